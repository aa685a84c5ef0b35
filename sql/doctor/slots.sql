-- What a server says that matters to copies of its logical slots, as one JSON object: a primary or a failover candidate.
-- What only privileged roles see (primary_conninfo) is NULL for others.
SELECT jsonb_build_object(
    'version', current_setting('server_version_num')::int,
    'version_text', current_setting('server_version'),
    'database', current_database(),
    'in_recovery', pg_is_in_recovery(),
    'system_id', (SELECT system_identifier::text FROM pg_control_system()),
    'settings', (
        SELECT jsonb_object_agg(name, setting) FROM pg_settings
        WHERE name IN ('wal_level', 'max_replication_slots', 'hot_standby_feedback', 'primary_slot_name',
                       'wal_receiver_status_interval', 'sync_replication_slots', 'synchronized_standby_slots',
                       'output_plugin_libraries', 'idle_replication_slot_timeout', 'max_slot_wal_keep_size')),
    'disk', jsonb_build_object(
        'local', inet_server_addr() IS NULL OR inet_server_addr() = inet_client_addr(),
        'folder', (SELECT setting FROM pg_settings WHERE name = 'data_directory'),
        'kept', (SELECT max((CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END
                             - restart_lsn)::bigint) FROM pg_replication_slots)),
    'conninfo_dbname', (SELECT setting ~ 'dbname\s*=' OR setting ~ '^postgres(ql)?://[^/]*/[^?]' FROM pg_settings
                        WHERE name = 'primary_conninfo'),
    'receiver_slot', (SELECT slot_name FROM pg_stat_wal_receiver),
    'receiver_host', (SELECT sender_host FROM pg_stat_wal_receiver),
    'receiver_port', (SELECT sender_port FROM pg_stat_wal_receiver),
    'receiver_status', (SELECT status FROM pg_stat_wal_receiver),
    'slots', (SELECT coalesce(jsonb_agg(to_jsonb(s)), '[]') FROM pg_replication_slots AS s),
    'role', (SELECT jsonb_build_object(
                 'name', rolname, 'superuser', rolsuper, 'replication', rolreplication,
                 'sees', pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'))
             FROM pg_roles WHERE rolname = current_user),
    'extension_stranger', (SELECT min(r.rolname::text)
                           FROM pg_namespace AS n LEFT JOIN pg_proc AS p ON p.pronamespace = n.oid
                           JOIN pg_roles AS r ON r.oid IN (n.nspowner, p.proowner) AND NOT r.rolsuper
                           WHERE n.nspname = 'tuskline_slots'),
    'extension', (SELECT jsonb_build_object(
                      'usable', has_schema_privilege(n.oid, 'USAGE') AND has_function_privilege(p.oid, 'EXECUTE'),
                      'version', (SELECT extversion FROM pg_extension WHERE extname = 'tuskline'))
                  FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
                  WHERE n.nspname = 'tuskline_slots' AND p.proname = 'inspect' LIMIT 1),
    'available', (SELECT default_version FROM pg_available_extensions WHERE name = 'tuskline')
);
