-- The keys and digests of rows that the lake can hold.
SELECT {keys}, digest, count(*) FROM ({digests}) AS digested WHERE is_held AND {wanted} GROUP BY 1, 2;
