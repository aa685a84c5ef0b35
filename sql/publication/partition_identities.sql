-- Partitions whose updates and deletes carry other columns than the key of the table through whose root they are
-- published: of the named tables, or of all. Those without an identity have no updates and deletes.
WITH RECURSIVE roots AS (
    SELECT c.oid
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind = 'p' AND c.relpersistence = 'p'
      AND CASE WHEN %(all)s THEN NOT c.relispartition
               ELSE (n.nspname::text, c.relname::text) IN (SELECT * FROM unnest(%(schemas)s::text[], %(tables)s::text[]))
          END
), parts AS (
    SELECT r.oid AS root, i.inhrelid AS oid FROM roots AS r JOIN pg_inherits AS i ON i.inhparent = r.oid
    UNION ALL
    SELECT p.root, i.inhrelid
    FROM parts AS p JOIN pg_class AS c ON c.oid = p.oid AND c.relkind = 'p' JOIN pg_inherits AS i ON i.inhparent = p.oid
), identities AS (
    SELECT c.oid, n.nspname::text AS schema, c.relname::text AS name, c.relkind,
           CASE WHEN c.relreplident <> 'f' THEN ARRAY(
               SELECT a.attname::text
               FROM pg_index AS k JOIN pg_attribute AS a
                   ON a.attrelid = k.indrelid AND a.attnum = ANY ((k.indkey::int2[])[0:k.indnkeyatts - 1])
               WHERE k.indrelid = c.oid AND k.indimmediate
                 AND CASE c.relreplident WHEN 'i' THEN k.indisreplident WHEN 'd' THEN k.indisprimary END
           ) END AS columns
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.oid IN (SELECT root FROM parts UNION SELECT oid FROM parts)
)
SELECT d.schema, d.name, r.schema, r.name, format('%%I.%%I', d.schema, d.name) AS quoted
FROM parts AS p JOIN identities AS d ON d.oid = p.oid JOIN identities AS r ON r.oid = p.root
WHERE d.relkind = 'r' AND d.columns <> '{}' AND NOT coalesce(r.columns <> '{}' AND r.columns <@ d.columns, false)
ORDER BY 1, 2;
