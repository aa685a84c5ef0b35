-- Selects one table by its name.
SELECT n.nspname, c.relname, c.oid::bigint, c.relkind::text, c.relreplident::text
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND c.relkind IN ('r', 'p');
