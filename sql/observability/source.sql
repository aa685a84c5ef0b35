-- A source's end of WAL, its slot, and how far behind its walsender is in time (NULL: nothing is outstanding,
-- or the role may not see it). LSNs as bytes.
SELECT (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint AS server_lsn,
       s.active,
       (s.confirmed_flush_lsn - '0/0'::pg_lsn)::bigint AS confirmed_lsn,
       (pg_current_wal_flush_lsn() - s.restart_lsn)::bigint AS retained_bytes,
       to_jsonb(s) ->> 'wal_status' AS wal_status,
       extract(epoch FROM r.write_lag)::float8 AS write_lag,
       extract(epoch FROM r.flush_lag)::float8 AS flush_lag
FROM (SELECT) AS one
LEFT JOIN pg_replication_slots AS s ON s.slot_name = %(slot)s
LEFT JOIN pg_stat_replication AS r ON r.pid = s.active_pid;
