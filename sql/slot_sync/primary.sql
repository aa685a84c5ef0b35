-- What a primary shows of its slots, as one JSON object, and whether this session is the one controller of this
-- database's server from now on until it ends, if it wants to be. No name and no operator here is anybody else's: the
-- search_path of every session is pg_catalog. The inner query is slots_marked.sql, or slots_bare.sql without the
-- extension. JSON as text, and whole rows: with hundreds of slots a third of what jsonb costs the server.
-- What comes first is read first: walsenders, physical slots, logical ones. A reply that is counted too late would prove
-- what is not so. The end of the WAL is read last: what held a lock on a database, and holds none, has inserted all by
-- then, if not written it. Whoever may not see other people's sessions (pg_read_all_stats) sees of them only their process ids.
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
