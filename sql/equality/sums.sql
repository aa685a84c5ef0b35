-- By chunk: the number of rows that the lake can hold, the sums of both halves of their digests, and the number of other rows.
SELECT chunk, count(*) FILTER (WHERE is_held), coalesce(sum(first) FILTER (WHERE is_held), 0),
       coalesce(sum(second) FILTER (WHERE is_held), 0), count(*) FILTER (WHERE NOT is_held)
FROM (SELECT {chunk} AS chunk, is_held,
             ('x' || encode(substr(digest, 1, 8), 'hex'))::bit(64)::bigint AS first,
             ('x' || encode(substr(digest, 9, 8), 'hex'))::bit(64)::bigint AS second
      FROM ({digests}) AS digested WHERE {wanted} OFFSET 0) AS numbered
GROUP BY chunk;
