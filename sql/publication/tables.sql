-- Every table that a source's `tables` could mean, and those that it names (%(schemas)s, %(tables)s), with the fields of
-- `walsender_bridge.postgres.table_patterns.CatalogTable`.
WITH RECURSIVE named AS (
    SELECT * FROM unnest(%(schemas)s::text[], %(tables)s::text[]) AS t (schema, name)
), found AS (
    SELECT c.oid, n.nspname::text AS schema, c.relname::text AS name, c.relkind, c.relpersistence, c.relowner
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE (c.relkind IN ('r', 'p') AND c.relpersistence <> 't' AND c.oid >= 16384
           AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'tuskline'))
       OR (c.relkind IN ('r', 'p', 'v', 'm', 'f') AND (n.nspname::text, c.relname::text) IN (SELECT * FROM named))
), links AS (
    SELECT i.inhparent AS above, i.inhrelid AS below, c.relispartition AS parted, c.relkind, c.relpersistence
    FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
), parts AS (
    -- What is below a table; `parted`: by partitioning alone.
    SELECT f.oid AS top, f.oid, true AS parted FROM found AS f
    UNION
    SELECT p.top, l.below, p.parted AND l.parted FROM parts AS p JOIN links AS l ON l.above = p.oid
), roots AS (
    SELECT l.below AS part, l.above FROM links AS l WHERE l.parted
    UNION
    SELECT r.part, l.above FROM roots AS r JOIN links AS l ON l.below = r.above AND l.parted
), entries AS (
    SELECT r.prrelid AS oid FROM pg_publication_rel AS r JOIN pg_publication AS p ON p.oid = r.prpubid
    WHERE p.pubname = %(publication)s
), sent AS (
    SELECT c.oid
    FROM pg_publication_tables AS t
    JOIN pg_namespace AS n ON n.nspname = t.schemaname
    JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = t.tablename
    WHERE t.pubname = %(publication)s
), leaves AS (
    SELECT p.top, p.parted, c.oid, format('%%I.%%I', n.nspname, c.relname) AS quoted, c.relkind, c.relpersistence,
           c.relreplident,
           c.relkind <> 'r' OR CASE c.relreplident
               WHEN 'f' THEN true
               -- PostgreSQL takes no deferrable primary key for an identity.
               WHEN 'd' THEN EXISTS (
                   SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate)
               WHEN 'i' THEN EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisreplident)
               ELSE false END AS identified
    FROM parts AS p JOIN pg_class AS c ON c.oid = p.oid JOIN pg_namespace AS n ON n.oid = c.relnamespace
), evaluated AS (
    SELECT l.top, array_agg(l.quoted ORDER BY l.quoted) FILTER (WHERE l.parted AND NOT l.identified) AS bare,
           array_agg(l.quoted ORDER BY l.quoted) FILTER (WHERE NOT l.parted AND NOT l.identified) AS children,
           array_agg(l.quoted ORDER BY l.quoted) FILTER (
               WHERE l.parted AND l.oid <> l.top AND (l.relkind = 'f' OR l.relpersistence <> 'p')) AS unlogged
    FROM leaves AS l GROUP BY l.top
), generated AS (
    SELECT l.top, array_agg(concat(l.quoted, '.', quote_ident(a.attname)) ORDER BY l.quoted, a.attnum) AS columns
    FROM leaves AS l JOIN pg_attribute AS a ON a.attrelid = l.oid
    -- Without a missing value: see lake/shapes.sql.
    WHERE l.relkind = 'r' AND a.attnum > 0 AND a.atthasdef
      AND coalesce(CASE WHEN NOT a.atthasmissing THEN to_jsonb(a) ->> 'attgenerated' END, '') <> ''
      AND NOT (CASE WHEN NOT a.atthasmissing THEN to_jsonb(a) ->> 'attgenerated' END = 's' AND EXISTS (
          SELECT FROM pg_publication AS p WHERE p.pubname = %(publication)s AND to_jsonb(p) ->> 'pubgencols' = 's'))
      -- Since 18 the server refuses UPDATEs of whole rows, too, of which it does not send a column.
      AND CASE WHEN l.relreplident = 'f' THEN current_setting('server_version_num')::int >= 180000
          ELSE EXISTS (
              SELECT FROM pg_index AS k
              WHERE k.indrelid = l.oid AND k.indimmediate
                AND CASE l.relreplident WHEN 'i' THEN k.indisreplident WHEN 'd' THEN k.indisprimary END
                AND a.attnum = ANY ((k.indkey::int2[])[0:k.indnkeyatts - 1])) END
    GROUP BY l.top
), above AS (
    SELECT r.part, bool_or(r.above IN (SELECT s.oid FROM sent AS s)) AS sent,
           max(ARRAY[n.nspname::text, c.relname::text]) FILTER (WHERE NOT c.relispartition) AS root
    FROM roots AS r JOIN pg_class AS c ON c.oid = r.above JOIN pg_namespace AS n ON n.oid = c.relnamespace
    GROUP BY r.part
)
SELECT f.schema, f.name, format('%%I.%%I', f.schema, f.name) AS quoted, f.relkind::text AS kind,
       f.relpersistence = 'p' AS logged, a.root,
       f.oid IN (
           SELECT d.objid FROM pg_depend AS d
           WHERE d.classid = 'pg_class'::regclass AND d.deptype = 'e') AS of_extension,
       coalesce(j.bare, '{}') AS bare, coalesce(j.children, '{}') AS children, coalesce(j.unlogged, '{}') AS unlogged,
       f.oid IN (SELECT i.indrelid FROM pg_index AS i WHERE i.indisprimary AND i.indimmediate) AS has_key,
       coalesce(g.columns, '{}') AS generated,
       pg_has_role(f.relowner, 'USAGE') AS owned,
       f.oid IN (SELECT s.oid FROM sent AS s) OR coalesce(a.sent, false) OR f.oid IN (SELECT e.oid FROM entries AS e)
           AS published,
       f.oid IN (SELECT e.oid FROM entries AS e) AS member
FROM found AS f JOIN evaluated AS j ON j.top = f.oid
LEFT JOIN above AS a ON a.part = f.oid
LEFT JOIN generated AS g ON g.top = f.oid
ORDER BY 1, 2;
