-- The slot that keeps WAL for safekeepers: its type, the oldest WAL kept (bytes), whether it is active, and its
-- wal_status (13 and newer), which shows an invalidated slot.
SELECT s.slot_type, pg_catalog.pg_wal_lsn_diff(s.restart_lsn, '0/0'), s.active, pg_catalog.to_jsonb(s) ->> 'wal_status'
FROM pg_catalog.pg_replication_slots AS s
WHERE s.slot_name = %(slot)s;
