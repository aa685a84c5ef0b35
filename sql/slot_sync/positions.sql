-- Where a slot of a standby begins, what it has confirmed, and what the standby has replayed.
SELECT ARRAY[restart_lsn, confirmed_flush_lsn, pg_last_wal_replay_lsn()]::text[]
FROM pg_replication_slots WHERE slot_name = %(name)s;
