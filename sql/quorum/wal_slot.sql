-- The slot that keeps WAL for safekeepers: its kind, the oldest WAL kept (bytes), whether somebody uses it, and whether
-- the server has invalidated it (13 and newer).
SELECT s.slot_type, pg_catalog.pg_wal_lsn_diff(s.restart_lsn, '0/0'), s.active, pg_catalog.to_jsonb(s) ->> 'wal_status'
FROM pg_catalog.pg_replication_slots AS s
WHERE s.slot_name = %(slot)s;
