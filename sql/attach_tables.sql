-- Each wanted table (every table of the database when none is named) and the partitions that hold its rows,
-- with what capture and the copy need of it, for the role %(role)s.
WITH RECURSIVE wanted AS (
    SELECT n.nspname AS root_schema, c.relname AS root_name, c.oid
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f')
      AND CASE WHEN cardinality(%(tables)s::text[]) > 0
               THEN (n.nspname::text, c.relname::text) IN (SELECT * FROM unnest(%(schemas)s::text[], %(tables)s::text[]))
               ELSE c.relkind = 'r' AND c.relpersistence = 'p'
                    AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'tuskline')
                    AND c.oid >= 16384
          END
), parts AS (
    SELECT root_schema, root_name, oid FROM wanted
    UNION ALL
    SELECT parts.root_schema, parts.root_name, i.inhrelid FROM parts JOIN pg_inherits AS i ON i.inhparent = parts.oid
    JOIN pg_class AS c ON c.oid = i.inhrelid AND c.relispartition
), me AS (
    SELECT oid, rolsuper OR rolbypassrls AS sees_all FROM pg_roles WHERE rolname = %(role)s
)
SELECT parts.root_schema, parts.root_name, n.nspname AS schema, c.relname AS name,
       format('%%I.%%I', n.nspname, c.relname) AS quoted,
       c.relkind::text AS kind,
       c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AS publishable,
       c.relkind <> 'r' OR CASE c.relreplident
           WHEN 'f' THEN true
           -- PostgreSQL takes no deferrable primary key for an identity.
           WHEN 'd' THEN EXISTS (
               SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate)
           WHEN 'i' THEN EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisreplident)
           ELSE false END AS identified,
       has_schema_privilege(me.oid, n.oid, 'USAGE') AS reachable,
       has_table_privilege(me.oid, c.oid, 'SELECT') AS readable,
       pg_has_role(me.oid, c.relowner, 'USAGE') AS owned,
       c.relrowsecurity AND NOT me.sees_all
           AND (c.relforcerowsecurity OR NOT pg_has_role(me.oid, c.relowner, 'USAGE')) AS hidden,
       ARRAY(SELECT a.attname::text FROM pg_attribute AS a
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
               AND coalesce(to_jsonb(a) ->> 'attgenerated', '') <> ''
             ORDER BY a.attnum) AS generated
FROM parts JOIN pg_class AS c ON c.oid = parts.oid JOIN pg_namespace AS n ON n.oid = c.relnamespace
CROSS JOIN me
ORDER BY 1, 2, 3, 4;
