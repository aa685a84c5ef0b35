-- Whether superusers own the extension's schema and all functions in it: any role that may create schemas can take these
-- names. NULL: there is no such schema.
SELECT bool_and(r.rolsuper)
FROM pg_namespace AS n LEFT JOIN pg_proc AS p ON p.pronamespace = n.oid
JOIN pg_roles AS r ON r.oid IN (n.nspowner, p.proowner)
WHERE n.nspname = 'tuskline_slots'
