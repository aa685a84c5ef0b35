-- Published tables, or partitions of such, that have no replica identity (any more): the server refuses their
-- UPDATEs and DELETEs.
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
WHERE c.relkind = 'r' AND NOT CASE c.relreplident
    WHEN 'f' THEN true
    -- PostgreSQL takes no deferrable primary key for an identity.
    WHEN 'd' THEN EXISTS (
        SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisprimary AND i.indimmediate)
    WHEN 'i' THEN EXISTS (SELECT FROM pg_index AS i WHERE i.indrelid = c.oid AND i.indisreplident)
    ELSE false END
ORDER BY 1;
