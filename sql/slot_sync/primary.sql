-- The primary's slots, as one JSON object; on request it also takes the lock of the active controller, which this session
-- holds until it ends. All names and operators resolve to pg_catalog, each session's search_path. The subquery is
-- marked.sql, or bare.sql without the extension. json (text) of whole rows: with hundreds of slots it costs the server a
-- third of jsonb. The order of the reads matters: walsenders, physical slots, logical slots; a reply that is counted too
-- late would be a false proof. The end of the WAL is read last: a session that has released its lock on a database has
-- inserted all its WAL by then, though perhaps not written it. A role without pg_read_all_stats sees only the process ids
-- of other users' sessions.
SELECT json_build_object(
    'turn', CASE WHEN %(turn)s THEN pg_try_advisory_lock(1414747979, 1) END,
    'version', current_setting('server_version_num')::int,
    'wal_level', current_setting('wal_level'),
    'system_id', (SELECT system_identifier::text FROM pg_control_system()),
    'in_recovery', pg_is_in_recovery(),
    'timeline', (SELECT CASE WHEN pg_is_in_recovery() THEN timeline_id ELSE
                     ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int END
                 FROM pg_control_checkpoint()),
    'postmaster_start', round(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint,
    'senders', (SELECT coalesce(json_agg(json_build_object(
                    'pid', r.pid,
                    'backend_start', round(extract(epoch FROM r.backend_start) * 1000000)::bigint,
                    'reply_time', round(extract(epoch FROM (to_jsonb(r) ->> 'reply_time')::timestamptz) * 1000000)::bigint,
                    'flush_lsn', r.flush_lsn)), '[]')
                FROM pg_stat_replication AS r),
    'physical', (SELECT coalesce(json_agg(s), '[]') FROM pg_replication_slots AS s
                 WHERE s.slot_type = 'physical'),
    'logical', (SELECT coalesce(json_agg(s), '[]') FROM pg_replication_slots AS s
                WHERE s.slot_type = 'logical'),
    'inspected', (SELECT coalesce(json_agg(i.slot), '[]') FROM ({inspected}) AS i),
    'databases', (SELECT json_agg(json_build_object(
                      'oid', d.oid::text, 'xmin', d.xmin::text,
                      'locked', d.oid IN (SELECT l.objid FROM pg_locks AS l
                                          WHERE l.locktype = 'object' AND l.classid = 'pg_database'::regclass
                                            AND l.mode = 'AccessExclusiveLock' AND l.granted)))
                  FROM pg_database AS d),
    'wal_lsn', (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END)::text
);
