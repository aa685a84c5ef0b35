-- The tables of a publication, as the subscriber sees them.
SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = %(publication)s;
