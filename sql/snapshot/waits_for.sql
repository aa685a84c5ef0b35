-- The transactions that the backend `pid` waits for: a prepared one's gid and database, or another backend's pid; and its age
-- in seconds (NULL: this role may not see it).
SELECT p.gid, p.database, h.pid,
       extract(epoch FROM clock_timestamp() - coalesce(p.prepared, a.xact_start))::bigint AS seconds
FROM pg_locks AS w
JOIN pg_locks AS h ON h.locktype = w.locktype AND h.transactionid = w.transactionid AND h.granted
LEFT JOIN pg_prepared_xacts AS p ON p.transaction = w.transactionid
LEFT JOIN pg_stat_activity AS a ON a.pid = h.pid
WHERE w.pid = %(pid)s AND w.locktype = 'transactionid' AND NOT w.granted;
