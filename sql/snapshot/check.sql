-- Whether the relation of this name is the one of this OID, with the files and columns of the snapshot.
-- TRUNCATE and rewrites are not transactional to older snapshots: these would find the new files and no rows in them.
-- Tables are read here as of the snapshot; the functions read the current catalog, as name resolution in a query does.
SELECT n.named,
       coalesce(c.relfilenode = pg_relation_filenode(c.oid), true) AS same_file,
       -- For a dropped relation they would return nothing.
       CASE WHEN n.named THEN NOT EXISTS (
           SELECT FROM pg_attribute AS a
           WHERE a.attrelid = {oid} AND a.attnum > 0 AND NOT a.attisdropped
             AND (pg_identify_object_as_address('pg_class'::regclass, a.attrelid, a.attnum)).object_names[3]
                 IS DISTINCT FROM a.attname::text) ELSE false END AS same_columns
FROM pg_class AS c CROSS JOIN LATERAL (SELECT coalesce(to_regclass({name}) = c.oid, false) AS named) AS n
WHERE c.oid = {oid};
