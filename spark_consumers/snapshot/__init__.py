"""An exported snapshot of a PostgreSQL server, held for as long as a copy needs it."""
