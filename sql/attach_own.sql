-- What a role may do in the schema of ours.
SELECT n.oid IS NOT NULL AND has_schema_privilege(r.oid, n.oid, 'USAGE') AS reachable,
       c.oid IS NOT NULL AND has_table_privilege(r.oid, c.oid, 'SELECT') AS readable,
       c.oid IS NOT NULL AND has_table_privilege(r.oid, c.oid, 'UPDATE') AS writable
FROM pg_roles AS r
LEFT JOIN pg_namespace AS n ON n.nspname = 'tuskline'
LEFT JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = 'flush'
WHERE r.rolname = %(role)s;
