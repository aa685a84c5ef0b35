-- The least value of a column in each of some blocks of a relation, in the order of the blocks.
SELECT min({value})
FROM ONLY {relation} TABLESAMPLE SYSTEM ({percent})
GROUP BY (ctid::text::point)[0]
ORDER BY (ctid::text::point)[0];
