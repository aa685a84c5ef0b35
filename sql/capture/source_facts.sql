-- What the source is: one row. The catalog is asked, not to_regclass: that fails without USAGE on the schema.
SELECT current_setting('wal_level') AS wal_level,
       pg_is_in_recovery() AS in_recovery,
       EXISTS (SELECT FROM pg_namespace WHERE nspname = 'tuskline') AS has_schema,
       (SELECT count(*) = 2 FROM pg_class AS c
        WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = 'tuskline')
          AND c.relname IN ('flush', 'provisioned')) AS has_tables;
