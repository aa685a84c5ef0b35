-- What the commit gate looks at: where the server is, whose slot it streamed from as a standby, and the candidates'
-- slots with the walsenders that have them. LSNs as bytes. pg_receivewal and base backups report no replay position. To
-- who may not see other people's sessions (pg_read_all_stats) a walsender has no state.
SELECT jsonb_build_object(
    'in_recovery', pg_is_in_recovery(),
    'timeline', CASE WHEN NOT pg_is_in_recovery()
                     THEN ('x' || substr(pg_walfile_name(pg_current_wal_flush_lsn()), 1, 8))::bit(32)::bigint END,
    'flush_lsn', CASE WHEN NOT pg_is_in_recovery() THEN (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint END,
    'was', current_setting('primary_slot_name', true),
    'may_see', pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'),
    'slots', (
        SELECT coalesce(jsonb_object_agg(s.slot_name, jsonb_build_object(
                   'restart_lsn', (s.restart_lsn - '0/0'::pg_lsn)::bigint,
                   'physical', s.slot_type = 'physical',
                   'wal_status', to_jsonb(s) ->> 'wal_status',
                   'sender', CASE WHEN s.active THEN jsonb_build_object(
                       'state', r.state,
                       'sent_lsn', (r.sent_lsn - '0/0'::pg_lsn)::bigint,
                       'flush_lsn', (r.flush_lsn - '0/0'::pg_lsn)::bigint,
                       'replays', r.replay_lsn IS NOT NULL) END)), '{}')
        FROM pg_replication_slots AS s
        LEFT JOIN pg_stat_replication AS r ON r.pid = s.active_pid
        WHERE s.slot_name = ANY (%(slots)s))
);
