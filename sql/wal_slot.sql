-- The slot that keeps WAL for safekeepers: its kind, the oldest WAL kept (bytes), and whether somebody uses it.
SELECT slot_type, pg_catalog.pg_wal_lsn_diff(restart_lsn, '0/0'), active
FROM pg_catalog.pg_replication_slots
WHERE slot_name = %(slot)s;
