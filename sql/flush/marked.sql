-- Before 13.5: the sessions that wait, with the kind of their request and the transaction (tuskline.mark in functions.sql). A lock has
-- 32 bits of the transaction's ID; the newest ID with these bits is meant.
SELECT l.pid, CASE l.classid::bigint WHEN 1953854315 THEN 'flush' ELSE 'sync' END,
       n.newest - ((n.newest - l.objid::bigint) & 4294967295)
FROM pg_locks AS l CROSS JOIN (SELECT txid_snapshot_xmax(txid_current_snapshot())) AS n (newest)
WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.classid::bigint IN (1953854315, 1953854316)
  AND l.database = (SELECT d.oid FROM pg_database AS d WHERE d.datname = current_database());
