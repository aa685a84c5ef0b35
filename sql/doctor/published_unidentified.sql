-- Published tables, or partitions of such, that have no replica identity (any more), or from 18 on one with a generated column
-- that is not sent: the server refuses their UPDATEs and DELETEs.
WITH RECURSIVE parts AS (
    SELECT c.oid
    FROM pg_publication_tables AS t
    JOIN pg_namespace AS n ON n.nspname = t.schemaname
    JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = t.tablename
    WHERE t.pubname = %(publication)s
    UNION
    SELECT i.inhrelid FROM parts JOIN pg_inherits AS i ON i.inhparent = parts.oid
    JOIN pg_class AS c ON c.oid = i.inhrelid AND c.relispartition
)
SELECT format('%%I.%%I', n.nspname, c.relname) AS name
FROM parts JOIN pg_class AS c ON c.oid = parts.oid JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relkind = 'r' AND (NOT CASE c.relreplident
    WHEN 'f' THEN true
    -- PostgreSQL takes no deferrable primary key for an identity.
    WHEN 'd' THEN EXISTS (
        SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate)
    WHEN 'i' THEN EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisreplident)
    ELSE false END
  OR current_setting('server_version_num')::int >= 180000 AND EXISTS (
    SELECT FROM pg_attribute AS a, pg_publication AS p
    WHERE a.attrelid = c.oid AND a.attnum > 0 AND a.atthasdef AND p.pubname = %(publication)s
      AND (CASE WHEN NOT a.atthasmissing THEN to_jsonb(a) ->> 'attgenerated' END = 'v'
           OR CASE WHEN NOT a.atthasmissing THEN to_jsonb(a) ->> 'attgenerated' END = 's' AND to_jsonb(p) ->> 'pubgencols' IS DISTINCT FROM 's')
      -- A column list says by itself what is sent.
      AND NOT EXISTS (
          SELECT FROM pg_publication_rel AS r
          WHERE r.prpubid = p.oid AND r.prrelid = c.oid AND to_jsonb(r) ->> 'prattrs' IS NOT NULL)
      AND (c.relreplident = 'f' OR EXISTS (
          SELECT FROM pg_index AS k
          WHERE k.indrelid = c.oid AND k.indimmediate
            AND CASE c.relreplident WHEN 'i' THEN k.indisreplident WHEN 'd' THEN k.indisprimary END
            AND a.attnum = ANY ((k.indkey::int2[])[0:k.indnkeyatts - 1])))))
ORDER BY 1;
