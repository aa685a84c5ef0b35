-- A slot's restart_lsn and confirmed_flush_lsn on a standby, and the standby's replay position.
SELECT ARRAY[restart_lsn, confirmed_flush_lsn, pg_last_wal_replay_lsn()]::text[]
FROM pg_replication_slots WHERE slot_name = %(name)s;
