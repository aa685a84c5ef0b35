-- Whether the schema of the extension and all functions in it are superusers': any role may make these names that may
-- create schemas. NULL: there is none.
SELECT bool_and(r.rolsuper)
FROM pg_namespace AS n LEFT JOIN pg_proc AS p ON p.pronamespace = n.oid
JOIN pg_roles AS r ON r.oid IN (n.nspowner, p.proowner)
WHERE n.nspname = 'tuskline_slots'
