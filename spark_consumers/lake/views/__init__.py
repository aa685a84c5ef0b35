"""Views: their SQL, and how they are kept. Pure but for the files of definitions."""
