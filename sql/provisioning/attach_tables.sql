-- Each named table and the partitions that hold its rows,
-- with what capture and the copy need of it, for the role %(role)s.
WITH RECURSIVE wanted AS (
    SELECT n.nspname AS root_schema, c.relname AS root_name, c.oid
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f')
      AND (n.nspname::text, c.relname::text) IN (SELECT * FROM unnest(%(schemas)s::text[], %(tables)s::text[]))
), parts AS (
    SELECT root_schema, root_name, oid FROM wanted
    UNION ALL
    SELECT parts.root_schema, parts.root_name, i.inhrelid FROM parts JOIN pg_inherits AS i ON i.inhparent = parts.oid
    JOIN pg_class AS c ON c.oid = i.inhrelid AND c.relispartition
), me AS (
    -- A role that is not there yet will have what everybody has.
    SELECT max(oid) AS oid, coalesce(bool_or(rolsuper OR rolbypassrls), false) AS sees_all
    FROM pg_roles WHERE rolname = %(role)s
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
       coalesce(has_schema_privilege(me.oid, n.oid, 'USAGE'), has_schema_privilege('public'::name, n.oid, 'USAGE')) AS reachable,
       coalesce(has_table_privilege(me.oid, c.oid, 'SELECT'), has_table_privilege('public'::name, c.oid, 'SELECT')) AS readable,
       coalesce(pg_has_role(me.oid, c.relowner, 'USAGE'), false) AS owned,
       c.relrowsecurity AND NOT me.sees_all
           AND (c.relforcerowsecurity OR NOT coalesce(pg_has_role(me.oid, c.relowner, 'USAGE'), false)) AS hidden,
       ARRAY(SELECT a.attname::text FROM pg_attribute AS a
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
               AND coalesce(CASE WHEN NOT a.atthasmissing THEN to_jsonb(a) ->> 'attgenerated' END, '') <> ''
             ORDER BY a.attnum) AS generated
FROM parts JOIN pg_class AS c ON c.oid = parts.oid JOIN pg_namespace AS n ON n.oid = c.relnamespace
CROSS JOIN me
ORDER BY 1, 2, 3, 4;
