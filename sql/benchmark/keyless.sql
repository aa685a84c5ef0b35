-- The accounts of pgbench once more, as a table whose key is a text.
CREATE TABLE events AS
SELECT md5(aid::text) AS id, aid AS number, bid, abalance, now() AS at, rtrim(filler) AS filler
FROM pgbench_accounts;
ALTER TABLE events ADD PRIMARY KEY (id);
