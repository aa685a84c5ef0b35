-- Each wanted table (every table of the database when none is named), with what publishing it would do.
-- `unidentified`: it, or those of its partitions, that have no replica identity, so that their UPDATEs and
-- DELETEs would be refused from the moment it is published.
WITH RECURSIVE wanted AS (
    SELECT n.nspname AS schema, c.relname AS name, c.oid, c.relkind, c.relpersistence
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f')
      AND CASE WHEN cardinality(%(tables)s::text[]) > 0
               THEN (n.nspname::text, c.relname::text) IN (SELECT * FROM unnest(%(schemas)s::text[], %(tables)s::text[]))
               ELSE c.relkind = 'r' AND c.relpersistence = 'p'
                    AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND c.oid >= 16384
          END
), parts AS (
    SELECT oid AS root, oid FROM wanted
    UNION ALL
    SELECT parts.root, i.inhrelid FROM parts JOIN pg_inherits i ON i.inhparent = parts.oid
    JOIN pg_class c ON c.oid = i.inhrelid AND c.relispartition
)
SELECT w.schema, w.name,
       w.relkind IN ('r', 'p') AND w.relpersistence = 'p' AS publishable,
       ARRAY(
           SELECT format('%%I.%%I', c.relnamespace::regnamespace, c.relname) FROM parts JOIN pg_class c ON c.oid = parts.oid
           WHERE parts.root = w.oid AND c.relkind = 'r' AND NOT CASE c.relreplident
               WHEN 'f' THEN true
               -- PostgreSQL takes no deferrable primary key for an identity.
               WHEN 'd' THEN EXISTS (
                   SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate)
               WHEN 'i' THEN EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisreplident)
               ELSE false END
           ORDER BY 1
       ) AS unidentified
FROM wanted w ORDER BY w.schema, w.name;
