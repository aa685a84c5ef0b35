-- The server's durable end of WAL in bytes.
SELECT (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint;
