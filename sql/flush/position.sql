-- The write-ahead log's insert position in bytes: whatever is committed by now ends at or below it.
-- And its timeline: positions of two timelines are not comparable.
SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::bigint,
       ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int;
