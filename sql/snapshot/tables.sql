-- The tables of a publication as a subscriber sees them. Column lists and row filters exist since 15.
SELECT n.nspname, c.relname, c.oid::bigint, c.relkind::text, c.relreplident::text,
       to_jsonb(t) -> 'attnames' AS attnames, to_jsonb(t) ->> 'rowfilter' AS row_filter
FROM pg_publication_tables AS t
JOIN pg_namespace AS n ON n.nspname = t.schemaname
JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = t.tablename
WHERE t.pubname = %(publication)s
ORDER BY 1, 2;
