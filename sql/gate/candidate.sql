-- A standby that is to become a primary, or was promoted: how far it has replayed (bytes), whom a commit on it waits
-- for, where its WAL comes from and by which slot, and who sends it. 11 has no setting primary_conninfo, nor restore_command.
SELECT pg_catalog.pg_is_in_recovery(),
       pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_last_wal_replay_lsn(), '0/0'),
       pg_catalog.current_setting('synchronous_standby_names'),
       pg_catalog.current_setting('synchronous_commit'),
       pg_catalog.current_setting('primary_conninfo', true),
       pg_catalog.current_setting('primary_slot_name', true),
       coalesce(pg_catalog.current_setting('restore_command', true), '') <> '',
       CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_is_wal_replay_paused() ELSE false END,
       (SELECT pg_catalog.array_agg(sender_port) FROM pg_catalog.pg_stat_wal_receiver WHERE sender_port IS NOT NULL);
