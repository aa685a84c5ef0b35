-- A table's columns now, and whether a row could have a value in one that no change has carried: a default (its
-- own, or its type's), NOT NULL, an identity, a generated value, or one that ADD COLUMN gave to the old rows (for a
-- partitioned table only its partitions show that).
WITH RECURSIVE relations AS (
    SELECT c.oid, c.relkind FROM pg_class AS c WHERE c.oid = %(table)s
    UNION ALL
    SELECT c.oid, c.relkind
    FROM relations AS f JOIN pg_inherits AS i ON i.inhparent = f.oid JOIN pg_class AS c ON c.oid = i.inhrelid
    WHERE f.relkind = 'p'
)
SELECT a.attname, a.atttypid::bigint, a.atttypmod,
       a.attnotnull OR a.atthasdef OR t.typtype = 'd' OR t.typdefault IS NOT NULL OR a.attname IN (
           SELECT m.attname FROM relations AS f JOIN pg_attribute AS m ON m.attrelid = f.oid
           WHERE m.attnum > 0 AND m.atthasmissing) AS filled
FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
WHERE a.attrelid = %(table)s AND a.attnum > 0 AND NOT a.attisdropped;
