-- A table's columns in order, with their types and whether they are in the primary key.
SELECT a.attname, a.atttypid::regtype::text, a.atttypmod, coalesce(a.attnum = ANY (i.indkey), false)
FROM pg_attribute AS a
LEFT JOIN pg_index AS i ON i.indrelid = a.attrelid AND i.indisprimary
WHERE a.attrelid = %(table)s::regclass AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''
ORDER BY a.attnum;
