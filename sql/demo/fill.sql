-- The bank's opening day: %(accounts)s accounts of 1,000.00 each.
INSERT INTO bank.accounts (id, owner, balance, opened, rating, tags, profile)
SELECT n, 'owner ' || n, 1000.00, date '2020-01-01' + n %% 1500, CASE WHEN n %% 7 > 0 THEN n / 7.0 END,
       ARRAY['tier ' || n %% 3, NULL, 'a "quoted", tag'], jsonb_build_object('n', n, 'name', 'ö € 😀')
FROM generate_series(1, %(accounts)s) AS n;

INSERT INTO bank.cards (account, slot, number, credit, pin)
SELECT n, 1, lpad(n::text, 16, '4'), CASE WHEN n %% 5 = 0 THEN 'NaN' ELSE n / 3.0 END, decode(md5(n::text), 'hex')
FROM generate_series(1, %(accounts)s, 2) AS n;

INSERT INTO bank.documents (id, account, title, body, pages)
SELECT n, n, 'statement ' || n, repeat(md5(n::text), 100), ARRAY[n, NULL, n * 2]
FROM generate_series(1, %(accounts)s / 5) AS n;

INSERT INTO bank.daily (bucket, total, seen) SELECT n, n * 0.1, n FROM generate_series(1, 10) AS n;
