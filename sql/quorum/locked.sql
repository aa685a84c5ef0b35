-- The session that blocks reads of the quorum's id: its pid (NULL: a prepared transaction) and query. It holds, or waits
-- for, ACCESS EXCLUSIVE on the table or one of its indexes.
WITH record AS (
    SELECT c.oid FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = 'tuskline' AND c.relname = 'provisioned')
SELECT l.pid, left(a.query, 80)
FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock'
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.relation IN (SELECT oid FROM record
                     UNION ALL SELECT i.indexrelid FROM pg_index AS i JOIN record ON i.indrelid = record.oid)
ORDER BY l.granted DESC, l.pid LIMIT 1;
