-- Rows %(first)s to %(last)s; every tenth note is NULL.
INSERT INTO wide
SELECT 'id-' || n,
       'user' || n || '@example' || mod(n, 97) || '.com',
       (ARRAY['Anna', 'Bruno', 'Chloë', 'Dmitri', 'Eve', 'Farid', 'Grace'])[1 + mod(n, 7)],
       (ARRAY['Almeida', 'Brandt', 'Castellanos', 'Dupont', 'Eriksson'])[1 + mod(n, 5)],
       'Street ' || mod(n, 5003) || ', house ' || mod(n, 113),
       (ARRAY['Amsterdam', 'Köln', 'Lisboa', 'Madrid', 'Oslo', 'Praha'])[1 + mod(n, 6)],
       (ARRAY['NL', 'DE', 'PT', 'ES', 'NO', 'CZ'])[1 + mod(n, 6)],
       '+49 ' || 1000000 + mod(n, 8999999),
       md5(n::text),
       'Mozilla/5.0 (X11; Linux x86_64) build ' || mod(n, 31),
       to_char(timestamp '2024-01-01' + n * interval '1 second', 'YYYY-MM-DD HH24:MI:SS'),
       CASE WHEN mod(n, 10) = 0 THEN NULL ELSE 'a note of some length about row ' || n END
FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS n;
