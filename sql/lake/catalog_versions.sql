-- Which rows the catalogs have that `shapes.sql` reads: of each row its place and version, which are another's after any change
-- of it. If they are the same as before, so is what `shapes.sql` finds. `filtered`: a row filter's text depends on more than that.
-- Left out are temporary objects, which come and go and are not published, and columns of the system but one. Of an index
-- some facts change in place.
WITH temporary AS (
    SELECT c.oid FROM pg_class AS c WHERE c.relpersistence = 't'
), schemas AS (
    SELECT n.oid FROM pg_namespace AS n WHERE n.nspname ~ '^pg_(toast_)?temp_'
), found (number, rows) AS (
    SELECT 1, (SELECT string_agg(concat(x.ctid, x.xmin), ',' ORDER BY x.ctid) FROM pg_class AS x WHERE x.relpersistence <> 't')
    UNION ALL
    SELECT 2, (SELECT string_agg(concat(x.ctid, x.xmin), ',' ORDER BY x.ctid) FROM pg_attribute AS x
               WHERE x.attnum >= -1 AND x.attrelid NOT IN (SELECT t.oid FROM temporary AS t))
    UNION ALL
    SELECT 3, (SELECT string_agg(concat(x.ctid, x.xmin), ',' ORDER BY x.ctid) FROM pg_type AS x
               WHERE x.typnamespace NOT IN (SELECT s.oid FROM schemas AS s))
    UNION ALL
    SELECT 4, (SELECT string_agg(concat(x.ctid, x.xmin, x.indisprimary, x.indisreplident, x.indimmediate), ',' ORDER BY x.ctid)
               FROM pg_index AS x WHERE x.indrelid NOT IN (SELECT t.oid FROM temporary AS t))
    UNION ALL
    SELECT 5, (SELECT string_agg(concat(x.ctid, x.xmin), ',' ORDER BY x.ctid) FROM pg_namespace AS x
               WHERE x.oid NOT IN (SELECT s.oid FROM schemas AS s))
    UNION ALL
    SELECT 6, (SELECT string_agg(concat(x.ctid, x.xmin), ',' ORDER BY x.ctid) FROM pg_inherits AS x
               WHERE x.inhrelid NOT IN (SELECT t.oid FROM temporary AS t))
    UNION ALL
    SELECT 7, (SELECT string_agg(concat(x.ctid, x.xmin), ',' ORDER BY x.ctid) FROM pg_proc AS x WHERE x.oid >= 16384)
    UNION ALL
    SELECT 8, (SELECT string_agg(concat(x.ctid, x.xmin), ',' ORDER BY x.ctid) FROM pg_enum AS x)
    UNION ALL
    SELECT 9, (SELECT string_agg(concat(x.ctid, x.xmin), ',' ORDER BY x.ctid) FROM pg_range AS x)
    UNION ALL
    SELECT 10, (SELECT string_agg(concat(x.ctid, x.xmin), ',' ORDER BY x.ctid) FROM pg_publication AS x)
    UNION ALL
    SELECT 11, (SELECT string_agg(concat(x.ctid, x.xmin), ',' ORDER BY x.ctid) FROM pg_publication_rel AS x)
    UNION ALL
    SELECT 13, (SELECT string_agg(concat(x.ctid, x.xmin), ',' ORDER BY x.ctid) FROM pg_event_trigger AS x)
    UNION ALL
    SELECT 12, (SELECT string_agg(x.row, ',' ORDER BY x.row) FROM ({schemas}) AS x (row))
)
SELECT sha256(convert_to(concat(pg_postmaster_start_time(), string_agg(concat(f.number, ':', f.rows), ';' ORDER BY f.number)), 'UTF8')),
       EXISTS (SELECT FROM pg_publication_rel AS r WHERE to_jsonb(r) ->> 'prqual' IS NOT NULL),
       (CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END - '0/0')::bigint
FROM found AS f;
