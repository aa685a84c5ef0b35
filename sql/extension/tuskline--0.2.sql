-- Copies of logical replication slots on standbys. Run by CREATE EXTENSION tuskline, on the primary.
-- Every name is qualified: what runs here must not depend on anybody's search_path.
\echo Use "CREATE EXTENSION tuskline" to load this file. \quit

-- The schema has to be the installer's own: whoever owns it could put functions beside these that take a call's
-- place. The role is made if there is none. Roles belong to all databases, so installing into another one may have made it,
-- or somebody who hopes for what it will be granted here: one that can log in or has members is not taken without a word.
DO LANGUAGE plpgsql $body$
DECLARE
    others pg_catalog.text;
BEGIN
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_namespace AS n
                   WHERE n.nspname OPERATOR(pg_catalog.=) '@extschema@'::pg_catalog.name
                     AND n.nspowner OPERATOR(pg_catalog.=) (
                         SELECT r.oid FROM pg_catalog.pg_roles AS r
                         WHERE r.rolname OPERATOR(pg_catalog.=) CURRENT_USER)) THEN
        RAISE EXCEPTION 'schema "@extschema@" belongs to another role'
            USING ERRCODE = 'insufficient_privilege', HINT = 'Drop the schema, or give it to the role that installs.';
    END IF;
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles AS r
                   WHERE r.rolname OPERATOR(pg_catalog.=) 'tuskline_slots'::pg_catalog.name) THEN
        CREATE ROLE tuskline_slots NOLOGIN;
        COMMENT ON ROLE tuskline_slots IS 'May manage copies of logical slots by the extension tuskline.';
    ELSIF pg_catalog.current_setting('tuskline.trust_role', true) IS DISTINCT FROM 'on' THEN
        SELECT pg_catalog.string_agg(pg_catalog.quote_ident(m.rolname::pg_catalog.text), ', ' ORDER BY m.rolname)
        INTO others
        FROM pg_catalog.pg_roles AS r
        LEFT JOIN pg_catalog.pg_auth_members AS g ON g.roleid OPERATOR(pg_catalog.=) r.oid
        JOIN pg_catalog.pg_roles AS m
            ON m.oid OPERATOR(pg_catalog.=) g.member OR (m.oid OPERATOR(pg_catalog.=) r.oid AND r.rolcanlogin)
        WHERE r.rolname OPERATOR(pg_catalog.=) 'tuskline_slots'::pg_catalog.name AND NOT m.rolsuper;
        IF others IS NOT NULL THEN
            RAISE EXCEPTION 'role "tuskline_slots" already exists and can be used by: %', others
                USING ERRCODE = 'insufficient_privilege',
                      HINT = 'If these roles may manage copies in this database, too, run SET tuskline.trust_role = on and try again.';
        END IF;
    END IF;
END
$body$;

CREATE FUNCTION @extschema@.reserve(
    slot_name pg_catalog.name,
    plugin pg_catalog.name,
    restart_lsn pg_catalog.pg_lsn,
    confirmed_flush_lsn pg_catalog.pg_lsn,
    two_phase pg_catalog.bool DEFAULT false,
    two_phase_at pg_catalog.pg_lsn DEFAULT NULL
) RETURNS pg_catalog.xid
AS 'MODULE_PATHNAME', 'tuskline_reserve' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.reserve(pg_catalog.name, pg_catalog.name, pg_catalog.pg_lsn, pg_catalog.pg_lsn,
                                        pg_catalog.bool, pg_catalog.pg_lsn)
    IS 'make a copy of a logical slot under a temporary name; returns the catalog_xmin that it holds';

CREATE FUNCTION @extschema@.advance(
    slot_name pg_catalog.name,
    upto_lsn pg_catalog.pg_lsn
) RETURNS pg_catalog.pg_lsn
AS 'MODULE_PATHNAME', 'tuskline_advance' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.advance(pg_catalog.name, pg_catalog.pg_lsn)
    IS 'move a copy by decoding all of the WAL up to a position; returns its confirmed_flush_lsn';

CREATE FUNCTION @extschema@.set_fields(
    slot_name pg_catalog.name,
    restart_lsn pg_catalog.pg_lsn,
    confirmed_flush_lsn pg_catalog.pg_lsn,
    catalog_xmin pg_catalog.xid,
    may_go_back pg_catalog.bool DEFAULT false
) RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'tuskline_set_fields' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.set_fields(pg_catalog.name, pg_catalog.pg_lsn, pg_catalog.pg_lsn, pg_catalog.xid,
                                           pg_catalog.bool)
    IS 'set and save the three fields of a copy together, where a snapshot for them is on this server';

CREATE FUNCTION @extschema@.set_failover(
    slot_name pg_catalog.name,
    failover pg_catalog.bool
) RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'tuskline_set_failover' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.set_failover(pg_catalog.name, pg_catalog.bool)
    IS 'set and save the failover property of a copy, which takes effect after a promotion (PostgreSQL 17 and later)';

CREATE FUNCTION @extschema@.restore_mappings(slot_name pg_catalog.name) RETURNS pg_catalog.pg_lsn
AS 'MODULE_PATHNAME', 'tuskline_restore_mappings' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.restore_mappings(pg_catalog.name)
    IS 'write the mapping files that a slot may need and a restartpoint has removed; returns up to where WAL was read';

CREATE FUNCTION @extschema@.rename(
    slot_name pg_catalog.name,
    new_name pg_catalog.name
) RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'tuskline_rename' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.rename(pg_catalog.name, pg_catalog.name)
    IS 'give a proven copy the name that clients use';

CREATE FUNCTION @extschema@.drop(
    slot_name pg_catalog.name,
    any_slot pg_catalog.bool DEFAULT false
) RETURNS pg_catalog.void
AS 'MODULE_PATHNAME', 'tuskline_drop' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.drop(pg_catalog.name, pg_catalog.bool)
    IS 'drop a copy, or any logical slot of this database; on a primary only one with a temporary name';

CREATE FUNCTION @extschema@.mark(slot_name pg_catalog.name, value pg_catalog.text) RETURNS pg_catalog.text
AS 'MODULE_PATHNAME', 'tuskline_mark' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.mark(pg_catalog.name, pg_catalog.text)
    IS 'the incarnation id of a slot, created with this value if there is none';

CREATE FUNCTION @extschema@.marker(slot_name pg_catalog.name) RETURNS pg_catalog.text
AS 'MODULE_PATHNAME', 'tuskline_marker' LANGUAGE C VOLATILE PARALLEL UNSAFE;
COMMENT ON FUNCTION @extschema@.marker(pg_catalog.name)
    IS 'the incarnation id of a slot; null if it has none';

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
