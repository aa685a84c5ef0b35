-- The relations that hold a table's rows: itself, or the leaf partitions of its tree; sizes in blocks.
WITH RECURSIVE parts AS (
    SELECT %(table)s::oid AS oid
    UNION ALL
    SELECT i.inhrelid
    FROM parts
    JOIN pg_class AS p ON p.oid = parts.oid AND p.relkind = 'p'
    -- A partition that DETACH ... CONCURRENTLY has begun to detach is no longer read through its parent.
    JOIN pg_inherits AS i ON i.inhparent = p.oid AND NOT coalesce((to_jsonb(i) ->> 'inhdetachpending')::bool, false)
)
SELECT n.nspname, c.relname, c.oid::bigint, c.relkind::text,
       coalesce(pg_relation_size(c.oid), 0) / current_setting('block_size')::bigint AS blocks,
       current_setting('block_size')::bigint AS block_size
FROM parts
JOIN pg_class AS c ON c.oid = parts.oid
JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relkind <> 'p'
ORDER BY 1, 2;
