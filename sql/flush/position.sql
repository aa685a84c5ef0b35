-- The write-ahead log's insert position in bytes: whatever is committed by now ends at or below it.
SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint;
