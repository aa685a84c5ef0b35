-- A failover candidate and its slots, as one JSON object. All names and operators resolve to pg_catalog, each session's
-- search_path. The subquery is inspected.sql, or bare.sql without the extension. The order of the reads matters: settings,
-- slots, then the clock and the flush position. A role without pg_read_all_stats sees only that a WAL receiver exists.
SELECT json_build_object(
    'version', current_setting('server_version_num')::int,
    'wal_level', current_setting('wal_level'),
    'system_id', (SELECT system_identifier::text FROM pg_control_system()),
    'in_recovery', pg_is_in_recovery(),
    'timeline', (SELECT CASE WHEN pg_is_in_recovery()
                     THEN greatest(c.timeline_id, r.min_recovery_end_timeline,
                                   (SELECT w.received_tli FROM pg_stat_wal_receiver AS w))
                     ELSE ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int END
                 FROM pg_control_checkpoint() AS c, pg_control_recovery() AS r),
    'postmaster_start', round(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint,
    'conf_load_time', round(extract(epoch FROM pg_conf_load_time()) * 1000000)::bigint,
    'settings', (SELECT json_object_agg(name, setting) FROM pg_settings
                 WHERE name IN ('hot_standby_feedback', 'wal_receiver_status_interval', 'primary_slot_name',
                              'sync_replication_slots', 'max_slot_wal_keep_size', 'wal_keep_size', 'wal_segment_size')),
    'idle_timeout', extract(epoch FROM current_setting('idle_replication_slot_timeout', true)::interval)::bigint,
    'receiver', (SELECT to_jsonb(w) - 'conninfo' FROM pg_stat_wal_receiver AS w),
    'receiver_start', (SELECT round(extract(epoch FROM a.backend_start) * 1000000)::bigint FROM pg_stat_activity AS a
                       JOIN pg_stat_wal_receiver AS w ON w.pid = a.pid),
    'replay_lsn', (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END)::text,
    'slots', (SELECT coalesce(json_agg(s), '[]') FROM pg_replication_slots AS s),
    'inspected', (SELECT coalesce(json_agg(i.slot), '[]') FROM ({inspected}) AS i),
    'databases', (SELECT json_agg(json_build_object('oid', d.oid::text, 'xmin', d.xmin::text)) FROM pg_database AS d),
    'clock', round(extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
    'flush_lsn', (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn() ELSE pg_current_wal_lsn() END)::text
);
