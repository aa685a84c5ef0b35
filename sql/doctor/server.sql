-- What a server says of itself, as one JSON object. Nothing here needs more than a login; what only a superuser
-- sees (other people's transactions) is left out where it is not shown.
SELECT jsonb_build_object(
    'version', current_setting('server_version_num')::int,
    'version_text', current_setting('server_version'),
    'database', current_database(),
    'system_id', (SELECT system_identifier::text FROM pg_control_system()),
    'encoding', current_setting('server_encoding'),
    'in_recovery', pg_is_in_recovery(),
    'settings', (
        SELECT jsonb_object_agg(name, jsonb_build_object('value', setting, 'unit', unit)) FROM pg_settings
        WHERE name IN ('wal_level', 'max_replication_slots', 'max_wal_senders', 'max_slot_wal_keep_size',
                       'idle_replication_slot_timeout', 'max_prepared_transactions')),
    'disk', jsonb_build_object(
        'local', inet_server_addr() IS NULL OR inet_server_addr() = inet_client_addr(),
        'folder', (SELECT setting FROM pg_settings WHERE name = 'data_directory'),
        'kept', (SELECT max((CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END
                             - restart_lsn)::bigint) FROM pg_replication_slots)),
    'slots_used', (SELECT count(*) FROM pg_replication_slots),
    'senders_used', (SELECT count(*) FROM pg_stat_replication),
    'role', (SELECT jsonb_build_object(
                 'name', %(role)s::text, 'there', bool_or(true) IS NOT NULL,
                 'superuser', coalesce(bool_or(rolsuper), false), 'login', coalesce(bool_or(rolcanlogin), false),
                 'replication', coalesce(bool_or(rolreplication OR rolsuper), false),
                 -- A role that is not there yet will have what everybody has.
                 'connect', coalesce(bool_or(has_database_privilege(r.oid, current_database(), 'CONNECT')),
                                     has_database_privilege('public'::name, current_database(), 'CONNECT')),
                 'groups', coalesce(jsonb_agg(g.name) FILTER (WHERE g.name IS NOT NULL), '[]'))
             FROM pg_roles AS r
             LEFT JOIN LATERAL (
                 SELECT o.rolname AS name FROM pg_roles AS o WHERE pg_has_role(r.oid, o.oid, 'MEMBER')) AS g ON true
             WHERE rolname = %(role)s),
    'may_create', coalesce((SELECT has_database_privilege(oid, current_database(), 'CREATE')
                            FROM pg_roles WHERE rolname = %(role)s), false),
    'prepared', (SELECT coalesce(jsonb_agg(gid ORDER BY prepared), '[]') FROM pg_prepared_xacts
                 WHERE database = current_database()),
    'oldest_seconds', (SELECT extract(epoch FROM now() - min(xact_start))::bigint FROM pg_stat_activity
                       WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid()),
    'published', (SELECT coalesce(jsonb_agg(jsonb_build_array(schemaname, tablename)), '[]') FROM pg_publication_tables
                  WHERE pubname = %(publication)s),
    'slots', (SELECT coalesce(jsonb_agg(to_jsonb(s)), '[]') FROM pg_replication_slots AS s
              WHERE s.database = current_database() OR s.slot_name = %(slot)s),
    'held_bytes', (SELECT jsonb_object_agg(s.slot_name, (CASE WHEN pg_is_in_recovery() THEN 0 ELSE
                       pg_current_wal_lsn() - s.restart_lsn END)::bigint)
                   FROM pg_replication_slots AS s WHERE s.restart_lsn IS NOT NULL)
);
