-- A transaction that a snapshot sees and that has not ended for the server: gid and database of a prepared one, or the backend's
-- pid, and its age in seconds (NULL: this role may not see it). No row, once all of them have ended.
WITH now AS (
    SELECT txid_current_snapshot() AS running
), candidates (xid) AS (
    SELECT txid_snapshot_xip(n.running) FROM now AS n
    UNION ALL
    -- Behind the last one that ended, running transactions are not listed.
    SELECT generate_series(txid_snapshot_xmax(n.running), txid_snapshot_xmax(%(snapshot)s::txid_snapshot) - 1) FROM now AS n
)
SELECT p.gid, p.database, a.pid, extract(epoch FROM clock_timestamp() - coalesce(p.prepared, a.xact_start))::bigint AS seconds
FROM candidates AS c
LEFT JOIN pg_prepared_xacts AS p ON p.transaction = (c.xid %% 4294967296)::text::xid
LEFT JOIN pg_stat_activity AS a ON a.backend_xid = (c.xid %% 4294967296)::text::xid
WHERE txid_visible_in_snapshot(c.xid, %(snapshot)s::txid_snapshot)
LIMIT 1;
