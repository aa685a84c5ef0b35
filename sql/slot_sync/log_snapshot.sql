-- Logs a record of the running transactions (xl_running_xacts), if this role may (16 and later).
SELECT pg_log_standby_snapshot()::text WHERE has_function_privilege('pg_log_standby_snapshot()', 'EXECUTE');
