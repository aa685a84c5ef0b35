-- The role's privileges in the schema tuskline (`record_readable`: on the record), and whether schema and record belong to a
-- superuser, who can be trusted with the record. Always one row, even for a role that does not exist yet.
SELECT coalesce(has_schema_privilege(r.oid, n.oid, 'USAGE'), false) AS reachable,
       coalesce(has_table_privilege(r.oid, c.oid, 'SELECT'), false) AS readable,
       coalesce(has_table_privilege(r.oid, c.oid, 'UPDATE'), false) AS writable,
       coalesce((SELECT s.rolsuper FROM pg_roles AS s WHERE s.oid = n.nspowner)
                AND (SELECT s.rolsuper FROM pg_roles AS s WHERE s.oid = m.relowner), false) AS recordable,
       coalesce(has_table_privilege(r.oid, m.oid, 'SELECT'), false) AS record_readable
FROM (SELECT (SELECT oid FROM pg_roles WHERE rolname = %(role)s) AS oid) AS r
LEFT JOIN pg_namespace AS n ON n.nspname = 'tuskline'
LEFT JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = 'flush'
LEFT JOIN pg_class AS m ON m.relnamespace = n.oid AND m.relname = 'provisioned';
