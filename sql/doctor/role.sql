-- What a role may that a quorum or a commit gate needs, as one JSON object; of one that is not there yet, what everybody may.
SELECT jsonb_build_object(
    'there', r.oid IS NOT NULL,
    'may_see', coalesce(pg_has_role(r.oid, 'pg_read_all_stats', 'USAGE'), false),
    'may_advance', has_function_privilege(coalesce(r.rolname, 'public'),
        'pg_catalog.pg_replication_slot_advance(name, pg_lsn)', 'EXECUTE'),
    'role', jsonb_build_object('name', %(role)s::text, 'superuser', coalesce(r.rolsuper, false),
                               'replication', coalesce(r.rolreplication, false), 'groups', '[]'::jsonb))
FROM (SELECT) AS one LEFT JOIN pg_roles AS r ON r.rolname = %(role)s;
