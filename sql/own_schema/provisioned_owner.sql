-- The role that owns the record of what was made, and whether the caller may write and read it. No row: no record.
SELECT pg_get_userbyid(c.relowner), current_user,
       has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'INSERT')
           AND has_table_privilege(c.oid, 'DELETE') AS writable,
       has_schema_privilege(n.oid, 'USAGE') AND has_table_privilege(c.oid, 'SELECT') AS readable
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = 'tuskline' AND c.relname = 'provisioned';
