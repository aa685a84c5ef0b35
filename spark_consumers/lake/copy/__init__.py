"""The copy of a table from PostgreSQL that its changes join."""
