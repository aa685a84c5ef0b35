-- A record of the transactions that run, if this role may have it written (16 and later).
SELECT pg_log_standby_snapshot()::text WHERE has_function_privilege('pg_log_standby_snapshot()', 'EXECUTE');
