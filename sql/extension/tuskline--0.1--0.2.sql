-- From 0.1 to 0.2: mapping files of rewritten catalogs, and incarnation ids of logical slots.
\echo Use "ALTER EXTENSION tuskline UPDATE" to load this file. \quit

CREATE FUNCTION @extschema@.restore_mappings(slot_name pg_catalog.name) RETURNS pg_catalog.pg_lsn
AS 'MODULE_PATHNAME', 'tuskline_restore_mappings' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.restore_mappings(pg_catalog.name)
    IS 'write the mapping files that a slot may need and a restartpoint has removed; returns up to where WAL was read';

CREATE FUNCTION @extschema@.marker(slot_name pg_catalog.name) RETURNS pg_catalog.text
AS 'MODULE_PATHNAME', 'tuskline_marker' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.marker(pg_catalog.name)
    IS 'the incarnation id of a slot; null if it has none';

COMMENT ON FUNCTION @extschema@.mark(pg_catalog.name, pg_catalog.text)
    IS 'the incarnation id of a slot, created with this value if there is none';

DROP FUNCTION @extschema@.inspect(pg_catalog.name);
CREATE FUNCTION @extschema@.inspect(
    name pg_catalog.name DEFAULT NULL,
    OUT slot_name pg_catalog.name,
    OUT plugin pg_catalog.name,
    OUT database pg_catalog.name,
    OUT active_pid pg_catalog.int4,
    OUT persistency pg_catalog.text,
    OUT restart_lsn pg_catalog.pg_lsn,
    OUT confirmed_flush_lsn pg_catalog.pg_lsn,
    OUT xmin pg_catalog.xid,
    OUT catalog_xmin pg_catalog.xid,
    OUT effective_xmin pg_catalog.xid,
    OUT effective_catalog_xmin pg_catalog.xid,
    OUT two_phase pg_catalog.bool,
    OUT two_phase_at pg_catalog.pg_lsn,
    OUT synced pg_catalog.bool,
    OUT invalidation pg_catalog.text,
    OUT dirty pg_catalog.bool,
    OUT saved_restart_lsn pg_catalog.pg_lsn,
    OUT saved_confirmed_flush_lsn pg_catalog.pg_lsn,
    OUT saved_catalog_xmin pg_catalog.xid,
    OUT snapshot_present pg_catalog.bool,
    OUT snapshot_complete pg_catalog.bool,
    OUT foreign_snapshot_after pg_catalog.bool,
    OUT wal_present pg_catalog.bool,
    OUT marker pg_catalog.text,
    OUT mappings_complete pg_catalog.bool
) RETURNS SETOF pg_catalog.record
AS 'MODULE_PATHNAME', 'tuskline_inspect' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.inspect(pg_catalog.name)
    IS 'what pg_replication_slots does not show: memory and disk, files, and the incarnation id';

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA @extschema@ FROM PUBLIC;
GRANT USAGE ON SCHEMA @extschema@ TO tuskline_slots;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA @extschema@ TO tuskline_slots;
