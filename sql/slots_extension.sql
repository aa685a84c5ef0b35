-- Whether the extension's functions are in this database and this role may call them.
SELECT coalesce(has_function_privilege(p.oid, 'EXECUTE') AND has_schema_privilege(n.oid, 'USAGE'), false)
FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
WHERE n.nspname = 'tuskline_slots' AND p.proname = 'advance';
