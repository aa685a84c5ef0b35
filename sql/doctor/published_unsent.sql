-- Published tables of which the publication does not send a part of the key, with these columns (column lists exist
-- since 15; generated columns are sent since 18, if the publication says so).
SELECT n.nspname::text, c.relname::text, array_agg(a.attname::text ORDER BY a.attnum)
FROM pg_publication_tables AS t
JOIN pg_namespace AS n ON n.nspname = t.schemaname
JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = t.tablename
JOIN pg_index AS k ON k.indrelid = c.oid AND k.indimmediate
    AND CASE c.relreplident WHEN 'i' THEN k.indisreplident WHEN 'd' THEN k.indisprimary END
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum = ANY ((k.indkey::int2[])[0:k.indnkeyatts - 1])
WHERE t.pubname = %(publication)s
  AND CASE WHEN jsonb_typeof(to_jsonb(t) -> 'attnames') = 'array' THEN NOT to_jsonb(t) -> 'attnames' ? a.attname::text
           ELSE coalesce(CASE WHEN NOT a.atthasmissing THEN to_jsonb(a) ->> 'attgenerated' END, '') <> '' END
GROUP BY 1, 2
ORDER BY 1, 2;
