-- What the source is: one row.
SELECT current_setting('wal_level') AS wal_level,
       pg_is_in_recovery() AS in_recovery,
       current_database() AS database,
       to_regclass('tuskline.flush') IS NOT NULL AS has_flush_table;
