"""A safekeeper's WAL for PostgreSQL's own clients: a walsender without a PostgreSQL (see README.md)."""
