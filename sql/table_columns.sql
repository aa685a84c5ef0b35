-- A table's columns now, and whether a row could have got a value in one that no change has told: a default (its
-- own, or its type's), NOT NULL, an identity, a generated value, or one that ADD COLUMN gave to the old rows.
SELECT a.attname, a.atttypid::bigint, a.atttypmod,
       a.attnotnull OR a.atthasdef OR a.atthasmissing OR t.typtype = 'd' OR t.typdefault IS NOT NULL AS filled
FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
WHERE a.attrelid = %(table)s AND a.attnum > 0 AND NOT a.attisdropped;
