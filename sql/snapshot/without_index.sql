-- Those of these relations of which no index finds a range of the column's values.
SELECT r.oid::bigint
FROM unnest(%(relations)s::bigint[]) AS r (oid)
WHERE NOT EXISTS (
    SELECT
    FROM pg_index AS i
    JOIN pg_class AS c ON c.oid = i.indexrelid
    JOIN pg_am AS m ON m.oid = c.relam AND m.amname = 'btree'
    JOIN pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = r.oid::oid AND i.indisvalid AND i.indpred IS NULL AND a.attname = %(column)s);
