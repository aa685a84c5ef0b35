-- The server's settings and statistics that concern a quorum of safekeepers, as one JSON object. LSNs as bytes. A role
-- without pg_read_all_stats sees neither waiting sessions nor the positions that the proposer has reported.
SELECT jsonb_build_object(
    'version', current_setting('server_version_num')::int,
    'version_text', current_setting('server_version'),
    'in_recovery', pg_is_in_recovery(),
    'flush_lsn', CASE WHEN pg_is_in_recovery() THEN NULL
                      ELSE (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint END,
    'names', current_setting('synchronous_standby_names'),
    -- The server-wide value. A setting of this session's role or database hides it; commit_elsewhere has that one.
    'commit', (
        SELECT CASE WHEN EXISTS (
                   SELECT FROM pg_db_role_setting AS s, unnest(s.setconfig) AS c (setting)
                   WHERE split_part(c.setting, '=', 1) = 'synchronous_commit'
                     AND s.setrole IN (0, (SELECT oid FROM pg_roles WHERE rolname = session_user))
                     AND s.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database())))
               THEN 'on' ELSE reset_val END
        FROM pg_settings WHERE name = 'synchronous_commit'),
    'commit_elsewhere', (
        SELECT coalesce(jsonb_agg(jsonb_build_object(
                   'role', r.rolname, 'database', d.datname, 'value', split_part(c.setting, '=', 2))
                   ORDER BY r.rolname, d.datname), '[]')
        FROM pg_db_role_setting AS s
        CROSS JOIN LATERAL unnest(s.setconfig) AS c (setting)
        LEFT JOIN pg_roles AS r ON r.oid = s.setrole
        LEFT JOIN pg_database AS d ON d.oid = s.setdatabase
        WHERE split_part(c.setting, '=', 1) = 'synchronous_commit'),
    'settings', (
        SELECT jsonb_object_agg(name, setting) FROM pg_settings
        WHERE name IN ('wal_level', 'max_replication_slots', 'max_wal_senders', 'max_slot_wal_keep_size')),
    'slots_used', (SELECT count(*) FROM pg_replication_slots),
    'senders_used', (SELECT count(*) FROM pg_stat_replication),
    'slot', (SELECT to_jsonb(s) FROM pg_replication_slots AS s WHERE s.slot_name = %(slot)s),
    'senders', (SELECT count(*) FROM pg_stat_replication WHERE lower(application_name) = lower(%(name)s)),
    -- Synchronous standbys other than the proposer that have several walsenders.
    'crowded', (
        SELECT coalesce(jsonb_agg(jsonb_build_object('name', name, 'walsenders', walsenders) ORDER BY name), '[]')
        FROM (SELECT lower(application_name), min(application_name), count(*)
              FROM pg_stat_replication
              WHERE sync_priority > 0 AND lower(application_name) <> lower(%(name)s)
              GROUP BY 1 HAVING count(*) > 1) AS s (folded, name, walsenders)),
    -- max(pg_lsn) exists from 13 on.
    'quorum_lsn', (SELECT max(flush_lsn - '0/0'::pg_lsn)::bigint FROM pg_stat_replication
                   WHERE lower(application_name) = lower(%(name)s)),
    'waiting', (SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'),
    'role', (SELECT jsonb_build_object('name', rolname, 'superuser', rolsuper, 'replication', rolreplication)
             FROM pg_roles WHERE rolname = current_user),
    'may_see', pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'),
    'may_advance', has_function_privilege('pg_catalog.pg_replication_slot_advance(name, pg_lsn)', 'EXECUTE')
);
