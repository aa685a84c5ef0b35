-- A table's columns in order: type (of a domain: its base type, without the modifier, which the change
-- stream does not tell either), whether generated, the function that writes its values as text, the type to give it
-- where that is another one (refcursor; the enum of a domain, since a domain is not an anyenum), and whether it is in the
-- key, by which the stream's updates and deletes name a row: that of the replica identity's index, by default the primary
-- key. With FULL they carry the whole row, and a change of the primary key emits no message. A deferrable key is not used:
-- rows may pass through each other's keys inside a statement, so changes cannot be followed by it.
WITH RECURSIVE bases AS (
    SELECT atttypid AS type, atttypid AS base
    FROM pg_attribute WHERE attrelid = %(table)s AND attnum > 0 AND NOT attisdropped
    UNION
    SELECT b.type, d.typbasetype FROM bases AS b JOIN pg_type AS d ON d.oid = b.base AND d.typtype = 'd'
)
SELECT a.attname, b.base::bigint, a.atttypmod,
       coalesce(CASE WHEN NOT a.atthasmissing THEN to_jsonb(a) ->> 'attgenerated' END, '') <> '' AS generated,
       ARRAY[fn.nspname, f.proname]::text[] AS output,
       CASE WHEN p.typtype <> 'p' AND p.oid <> b.base THEN ARRAY[pn.nspname, p.typname]::text[]
            WHEN p.typname = 'anyenum' AND t.typtype = 'd' THEN (
                SELECT ARRAY[en.nspname, e.typname]::text[]
                FROM pg_type AS e JOIN pg_namespace AS en ON en.oid = e.typnamespace WHERE e.oid = b.base)
            END AS argument,
       coalesce(a.attnum = ANY ((k.indkey::int2[])[0:k.indnkeyatts - 1]), false) AS is_key
FROM pg_attribute AS a
JOIN pg_class AS c ON c.oid = a.attrelid
JOIN pg_type AS t ON t.oid = a.atttypid
JOIN bases AS b ON b.type = a.atttypid
    AND NOT EXISTS (SELECT FROM pg_type AS d WHERE d.oid = b.base AND d.typtype = 'd')
JOIN pg_proc AS f ON f.oid = t.typoutput
JOIN pg_namespace AS fn ON fn.oid = f.pronamespace
JOIN pg_type AS p ON p.oid = f.proargtypes[0]
JOIN pg_namespace AS pn ON pn.oid = p.typnamespace
LEFT JOIN pg_index AS k
    ON k.indrelid = c.oid AND k.indimmediate
    AND CASE c.relreplident WHEN 'i' THEN k.indisreplident WHEN 'd' THEN k.indisprimary END
WHERE a.attrelid = %(table)s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum;
