-- Whether the relation of this name is the one of this OID, in the files and with the columns that the snapshot knew.
-- TRUNCATE and rewrites are not transactional to older snapshots: these would find the new files and no rows in them.
-- Tables are read here as of the snapshot; the functions look into today's catalog, as the names in a query do.
SELECT n.named,
       coalesce(c.relfilenode = pg_relation_filenode(c.oid), true) AS same_file,
       -- Of a relation that was dropped they would ask in vain.
       CASE WHEN n.named THEN NOT EXISTS (
           SELECT FROM pg_attribute AS a
           WHERE a.attrelid = {oid} AND a.attnum > 0 AND NOT a.attisdropped
             AND (pg_identify_object_as_address('pg_class'::regclass, a.attrelid, a.attnum)).object_names[3]
                 IS DISTINCT FROM a.attname::text) ELSE false END AS same_columns
FROM pg_class AS c CROSS JOIN LATERAL (SELECT coalesce(to_regclass({name}) = c.oid, false) AS named) AS n
WHERE c.oid = {oid};
