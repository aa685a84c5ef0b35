-- Whether this database has the extension's functions, in their newest version, and this role may call them.
-- The subquery is trusted.sql.
SELECT coalesce(has_function_privilege(p.oid, 'EXECUTE') AND has_schema_privilege(n.oid, 'USAGE'), false) AND ({trusted})
FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
WHERE n.nspname = 'tuskline_slots' AND p.proname = 'marker'
LIMIT 1;
