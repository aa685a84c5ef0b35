-- A table's columns in order: type, whether generated, the function that writes its values as text, and
-- whether it is in the key (the replica identity's index, otherwise the primary key). A deferrable key is none:
-- rows may pass through each other's keys inside a statement, so a change cannot be followed by it.
SELECT a.attname, a.atttypid::bigint, a.atttypmod,
       coalesce(to_jsonb(a) ->> 'attgenerated', '') <> '' AS generated,
       fn.nspname, f.proname,
       coalesce(a.attnum = ANY ((k.indkey::int2[])[0:k.indnkeyatts - 1]), false) AS is_key
FROM pg_attribute AS a
JOIN pg_class AS c ON c.oid = a.attrelid
JOIN pg_type AS t ON t.oid = a.atttypid
JOIN pg_proc AS f ON f.oid = t.typoutput
JOIN pg_namespace AS fn ON fn.oid = f.pronamespace
LEFT JOIN pg_index AS k
    ON k.indrelid = c.oid AND k.indimmediate
    AND CASE c.relreplident WHEN 'i' THEN k.indisreplident ELSE k.indisprimary END
WHERE a.attrelid = %(table)s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum;
