"""PostgreSQL's replication protocol without I/O: bytes in, values out."""
