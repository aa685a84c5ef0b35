-- Whether the table is in the files that the snapshot knew. TRUNCATE and rewrites are not transactional to
-- older snapshots: these would find the new files and no rows in them.
SELECT coalesce(c.relfilenode = pg_relation_filenode(c.oid), true) AS same
FROM pg_class AS c
WHERE c.oid = {oid};
