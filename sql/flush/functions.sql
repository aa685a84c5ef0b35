-- FLUSH and SYNC for SQL sessions (docs/flush.md). Run by the owner of the schema tuskline; a later version replaces them.
--
-- No function that others may call takes a lock of a row, so a transaction in which one was called delays nobody, however long
-- it stays open. What the lake reports is taken from roles alone that may write the mark, tuskline.flush.
DO $block$
BEGIN
    -- What is replaced keeps its owner, who could replace it again, and the procedures have the rights of whoever calls them. A table's
    -- triggers have the rights of these functions.
    IF EXISTS (
        SELECT FROM (
            SELECT f.pronamespace, f.proowner FROM pg_catalog.pg_proc AS f
            UNION ALL
            SELECT c.relnamespace, c.relowner FROM pg_catalog.pg_class AS c
            WHERE c.relname OPERATOR(pg_catalog.=) ANY (ARRAY['lakes', 'request_channel']::pg_catalog.name[])
        ) AS f (namespace, owner) JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) f.namespace
        JOIN pg_catalog.pg_roles AS o ON o.oid OPERATOR(pg_catalog.=) f.owner
        WHERE n.nspname OPERATOR(pg_catalog.=) 'tuskline'
          AND NOT (o.rolsuper OR o.oid OPERATOR(pg_catalog.=) n.nspowner OR o.rolname OPERATOR(pg_catalog.=) current_user)
    ) THEN
        RAISE EXCEPTION 'a function or table of the schema tuskline belongs to a role that is neither a superuser nor the owner of the schema'
            USING ERRCODE = 'insufficient_privilege', HINT = 'Drop what is of that role there.';
    END IF;
END
$block$;
CREATE TABLE IF NOT EXISTS tuskline.lakes (
    lake text NOT NULL,
    stream text NOT NULL,
    publication name NOT NULL,
    driver integer NOT NULL,
    timelines jsonb NOT NULL,
    timeline integer,
    visible txid_snapshot,
    epoch bigint,
    stage text,
    reason text,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (lake, stream)
);
COMMENT ON TABLE tuskline.lakes IS
    'What each lake shows of this database: all transactions that are visible in the snapshot, on the timeline. Published FOR ALL TABLES only.';

-- With a key, or in a publication FOR ALL TABLES the server would refuse to delete its row.
CREATE TABLE IF NOT EXISTS tuskline.request_channel (name text PRIMARY KEY);
COMMENT ON TABLE tuskline.request_channel IS
    'The channel by which sessions that wait notify the drivers of lakes. Its name is not for others: anyone may NOTIFY.';
REVOKE ALL ON TABLE tuskline.lakes, tuskline.request_channel FROM PUBLIC;

-- The timeline of the server's write-ahead log. Fails on a standby.
CREATE OR REPLACE FUNCTION tuskline.timeline() RETURNS integer
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
    SELECT ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int
$$;

-- The server and the database, as a token has them. What tuskline.lakes has of another, in a restored dump, means nothing here.
CREATE OR REPLACE FUNCTION tuskline.database() RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT concat_ws(':', (SELECT system_identifier FROM pg_control_system()),
                     (SELECT oid FROM pg_database WHERE datname = current_database()))
$$;

-- Whether a role, or one that it is a member of, may write to a published table.
CREATE OR REPLACE FUNCTION tuskline.may_flush(role oid) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    schemas jsonb := '[]';
BEGIN
    -- pg_publication_tables would lock all published tables, and so wait for others' DDL.
    IF to_regclass('pg_catalog.pg_publication_namespace') IS NOT NULL THEN
        EXECUTE 'SELECT coalesce(jsonb_agg(s.pnnspid::bigint), ''[]'') FROM pg_publication_namespace AS s' INTO schemas;
    END IF;
    RETURN EXISTS (
        WITH RECURSIVE published AS (
            SELECT c.oid FROM pg_class AS c
            WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
              AND (EXISTS (SELECT FROM pg_publication AS p WHERE p.puballtables)
                   OR c.oid IN (SELECT r.prrelid FROM pg_publication_rel AS r)
                   OR c.relnamespace IN (SELECT s::oid FROM jsonb_array_elements_text(schemas) AS s))
            UNION
            SELECT c.oid
            FROM published AS p JOIN pg_inherits AS i ON i.inhparent = p.oid JOIN pg_class AS c ON c.oid = i.inhrelid
            WHERE c.relispartition
        )
        SELECT FROM published AS c CROSS JOIN pg_roles AS r
        WHERE pg_has_role(role, r.oid, 'MEMBER')
          AND (has_table_privilege(r.oid, c.oid, 'DELETE, TRUNCATE')
               OR has_any_column_privilege(r.oid, c.oid, 'INSERT, UPDATE')));
END
$$;

-- Whether the session is of a role that may write the mark: the source's.
CREATE OR REPLACE FUNCTION tuskline.is_source() RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT has_table_privilege(session_user, 'tuskline.flush', 'UPDATE')
        OR has_table_privilege(coalesce(nullif(current_setting('role'), 'none'), session_user)::name, 'tuskline.flush', 'UPDATE')
$$;

-- Raises unless the session is of such a role, which alone may do this.
CREATE OR REPLACE FUNCTION tuskline.check_source(deed text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT tuskline.is_source() THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = 'permission denied to ' || deed,
            HINT = format('Only a role that may update tuskline.flush may %s.', deed);
    END IF;
END
$$;

-- Raises unless the session's role, or the one it acts as, may wait for the lake. What tells of lakes, or asks their drivers, calls it.
CREATE OR REPLACE FUNCTION tuskline.check_waiter() RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    acting text := nullif(current_setting('role'), 'none');
BEGIN
    IF NOT tuskline.is_source() AND NOT EXISTS (
        SELECT FROM pg_roles AS r WHERE r.rolname IN (session_user, acting) AND tuskline.may_flush(r.oid)
    ) THEN
        RAISE EXCEPTION USING ERRCODE = 'insufficient_privilege', MESSAGE = 'permission denied to wait for the lake',
            HINT = 'A role that may write to a published table may wait for it.';
    END IF;
END
$$;

-- A token of the current transaction. The message makes WAL of the transaction before anything depends on it: a server that
-- is promoted without it has not had the transaction, and one that has it never gives its ID to another transaction.
CREATE OR REPLACE FUNCTION tuskline.flush_token() RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    xid bigint;
    written pg_lsn;
BEGIN
    IF pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean THEN
        RAISE EXCEPTION USING ERRCODE = 'read_only_sql_transaction',
            MESSAGE = 'cannot take a flush token in a read-only transaction',
            HINT = 'Call tuskline.flush_token() on the primary, in the transaction that writes.';
    END IF;
    xid := txid_current();
    written := pg_logical_emit_message(true, 'tuskline'::text, ''::text);
    RETURN concat_ws(':', '1', tuskline.database(), tuskline.timeline(), written, xid);
END
$$;

-- Of a token: the ID of its transaction, which has committed on this server. Raises why that is not so. No row of this
-- database is read for it, except where the token is of an earlier timeline.
CREATE OR REPLACE FUNCTION tuskline.committed(token text) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    part text[] := regexp_match(token,
        '^1:([0-9]{1,20}):([0-9]{1,10}):([0-9]{1,9}):([0-9A-F]{1,8}/[0-9A-F]{1,8}):([0-9]{1,18})$');
    here integer;
    xid bigint;
    timelines jsonb;
    ended text;
    state text;
BEGIN
    PERFORM tuskline.check_waiter();
    IF part IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'malformed flush token',
            HINT = 'Use the value that tuskline.flush_token() returned in the transaction.';
    END IF;
    IF concat_ws(':', part[1], part[2]) <> tuskline.database() THEN
        RAISE EXCEPTION USING ERRCODE = 'TK004', MESSAGE = 'the flush token is of another server or database',
            HINT = 'Wait where the transaction was committed: same cluster, same database.';
    END IF;
    IF pg_is_in_recovery() THEN
        RAISE EXCEPTION USING ERRCODE = 'read_only_sql_transaction', MESSAGE = 'cannot wait on a standby',
            HINT = 'Wait on the primary.';
    END IF;
    here := tuskline.timeline();
    xid := part[5]::bigint;
    IF part[3]::integer <> here THEN
        SELECT l.timelines INTO timelines FROM tuskline.lakes AS l
        WHERE l.timelines ->> 'timeline' = here::text AND l.timelines ->> 'database' = tuskline.database() LIMIT 1;
        IF timelines IS NULL AND part[3]::integer < here THEN
            RAISE EXCEPTION USING ERRCODE = 'TK006',
                MESSAGE = format('the flush token is of timeline %s, and it is not known yet whether timeline %s continues it',
                                 part[3], here),
                HINT = 'The lake''s driver reports that once it is connected to this server. Check that it runs.';
        END IF;
        ended := timelines -> 'ends' ->> part[3];
        IF ended IS NULL THEN
            RAISE EXCEPTION USING ERRCODE = 'TK004',
                MESSAGE = format('the flush token is of timeline %s, which is not part of this server''s history', part[3]),
                HINT = 'If this is a former primary, wait on the present one.';
        ELSIF part[4]::pg_lsn > ended::pg_lsn THEN
            RAISE EXCEPTION USING ERRCODE = 'TK005', MESSAGE = 'the transaction of the flush token was lost in a failover',
                DETAIL = format('It wrote at %s of timeline %s, which this server left at %s.', part[4], part[3], ended),
                HINT = 'Repeat the transaction.';
        END IF;
    END IF;
    IF part[3]::integer = here AND part[4]::pg_lsn > pg_current_wal_insert_lsn() THEN
        RAISE EXCEPTION USING ERRCODE = 'TK005', MESSAGE = 'the transaction of the flush token was lost',
            DETAIL = format('It wrote at %s, which is past the end of this server''s write-ahead log.', part[4]),
            HINT = 'Repeat the transaction. If this is a former primary, wait on the present one.';
    END IF;
    BEGIN
        state := txid_status(xid);
    EXCEPTION WHEN invalid_parameter_value THEN
        RAISE EXCEPTION USING ERRCODE = 'TK004', MESSAGE = 'the flush token names a transaction ID that this server has not assigned',
            HINT = 'Use the value that tuskline.flush_token() returned.';
    END;
    IF state IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'TK007', MESSAGE = 'the outcome of the flush token''s transaction is no longer known',
            HINT = 'Wait without a token, for everything that is committed by now.';
    ELSIF state = 'aborted' THEN
        RAISE EXCEPTION USING ERRCODE = 'TK003', MESSAGE = 'the transaction of the flush token was rolled back',
            HINT = 'Nothing of it will be in the lake. Take another token in the transaction that repeats it.';
    ELSIF state <> 'committed' THEN
        IF EXISTS (SELECT FROM pg_prepared_xacts AS p WHERE p.transaction::text = (xid % 4294967296)::text) THEN
            RAISE EXCEPTION USING ERRCODE = 'TK002', MESSAGE = 'the transaction of the flush token is prepared, and not committed',
                HINT = 'Run COMMIT PREPARED first.';
        END IF;
        RAISE EXCEPTION USING ERRCODE = 'TK002', MESSAGE = 'the transaction of the flush token is still open',
            HINT = 'Run COMMIT first, and CALL the procedure outside of a transaction block.';
    END IF;
    RETURN xid;
END
$$;

-- The start of a wait: the ID of the transaction that is waited for. Without a token it is this one, which commits after
-- all that was committed before the call.
CREATE OR REPLACE FUNCTION tuskline.wait_begin(token text) RETURNS bigint
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF pg_is_in_recovery() THEN
        RAISE EXCEPTION USING ERRCODE = 'read_only_sql_transaction', MESSAGE = 'cannot wait on a standby',
            HINT = 'Wait on the primary.';
    END IF;
    IF token IS NULL THEN
        PERFORM tuskline.check_waiter();
        -- Nothing is committed that a standby, or the commit gate, could be waited for; but reads may write WAL, too.
        PERFORM set_config('synchronous_commit', 'local', true);
        RETURN txid_current();
    END IF;
    RETURN tuskline.committed(token);
END
$$;

-- Raises TK008 for the name of a lake that does not follow this database. While a driver without a row is connected, this is
-- unknown: it may be the driver of that lake, whose row was deleted or does not exist yet. Only behind() calls it.
CREATE OR REPLACE FUNCTION tuskline.check_lake(lake text) RETURNS void
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    known text;
BEGIN
    IF lake IS NULL OR EXISTS (
        SELECT FROM tuskline.lakes AS l JOIN pg_publication AS p ON p.pubname = l.publication WHERE l.lake = check_lake.lake
    ) OR EXISTS (
        SELECT FROM pg_stat_activity AS a
        WHERE a.application_name = 'tuskline-lake' AND a.datname = current_database()
          AND NOT EXISTS (SELECT FROM tuskline.lakes AS l WHERE l.driver = a.pid)
    ) THEN
        RETURN;
    END IF;
    PERFORM tuskline.check_waiter();
    SELECT string_agg(DISTINCT l.lake, ', ') INTO known
    FROM tuskline.lakes AS l JOIN pg_publication AS p ON p.pubname = l.publication;
    RAISE EXCEPTION USING ERRCODE = 'TK008', MESSAGE = format('no lake "%s" follows this database', lake),
        HINT = coalesce('These lakes do: ' || known || '.', 'No lake does yet: start `tuskline lake run`.');
END
$$;

-- Which lakes do not show the transaction yet, and why; no row once all do. A lake of a publication that is gone is left out. While a
-- session waits, a driver reports at least every five seconds (flush_service.py). Only wait_look() calls it.
CREATE OR REPLACE FUNCTION tuskline.behind(xid bigint, lake text)
RETURNS TABLE (name text, stage text, reason text)
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    here integer := tuskline.timeline();
    database text := tuskline.database();
    known boolean := false;
    found record;
BEGIN
    FOR found IN
        SELECT l.*, l.at < clock_timestamp() - interval '15 s' AS old,
               -- Seconds of this wait without a report. A driver reports nothing between the waits.
               extract(epoch FROM clock_timestamp() - greatest(l.at, statement_timestamp()))::integer AS silent,
               l.timeline = here AND txid_visible_in_snapshot(xid, l.visible)
                   AND l.timelines ->> 'database' = database AS shown,
               EXISTS (SELECT FROM pg_stat_activity AS a WHERE a.pid = l.driver AND a.application_name = 'tuskline-lake')
                   AND l.timelines ->> 'timeline' = here::text AND l.timelines ->> 'database' = database AS listens
        FROM tuskline.lakes AS l
        WHERE l.lake = coalesce(behind.lake, l.lake)
          AND EXISTS (SELECT FROM pg_publication AS p WHERE p.pubname = l.publication)
    LOOP
        known := true;
        IF found.shown IS NOT TRUE THEN
            name := format('stream %s of lake %s', found.stream, found.lake);
            stage := CASE WHEN NOT found.listens OR found.silent > 10 THEN 'driver'
                          WHEN found.stage IS NULL OR found.old THEN 'epoch' ELSE found.stage END;
            reason := CASE WHEN NOT found.listens THEN 'the lake''s driver is not connected to this server'
                           WHEN found.silent > 10
                               THEN format('the lake''s driver is connected, but has not answered for %s s', found.silent)
                           WHEN found.stage IS NULL OR found.old THEN 'no epoch has it yet' ELSE found.reason END;
            RETURN NEXT;
        END IF;
    END LOOP;
    IF NOT known THEN
        PERFORM tuskline.check_lake(lake);
        name := coalesce('lake ' || behind.lake, 'the lake');
        stage := 'driver';
        reason := 'no driver of it has ever connected to this server';
        RETURN NEXT;
    END IF;
END
$$;

-- Whether sessions ask by a lock: before 13.5, a server sends notifications when a CALL has ended, not when a procedure commits.
CREATE OR REPLACE FUNCTION tuskline.marks() RETURNS boolean
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT current_setting('server_version_num')::integer < 130005
$$;

-- Where sessions ask by a lock: an advisory one, shared, until the end of the transaction. Drivers look for it (marked.sql). Anyone may
-- hold the same one, exclusively: it is not waited for.
CREATE OR REPLACE FUNCTION tuskline.mark(kind text, xid bigint) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF tuskline.marks() THEN
        PERFORM pg_try_advisory_xact_lock_shared(CASE kind WHEN 'flush' THEN 1953854315 ELSE 1953854316 END,
                                                 (xid & 4294967295)::bit(32)::integer);
    END IF;
END
$$;

-- Milliseconds until then, as a timeout has them: 1 to 2147483647.
CREATE OR REPLACE FUNCTION tuskline.milliseconds_until(deadline timestamptz) RETURNS integer
LANGUAGE sql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE WHEN NOT isfinite(deadline) THEN 2147483647
                ELSE least(greatest(extract(epoch FROM deadline - clock_timestamp()) * 1000, 1), 2147483647)::integer END
$$;

-- One look of a wait: whether it is over. `ask`: remind the drivers. Raises TK001 at the deadline. The role is checked before anything is
-- told or asked, but not at each look (40 a second), since that reads the privileges on all published tables. A COMMIT with a notification takes a
-- lock, which another session's COMMIT may hold for as long as it waits for a standby: `lock_timeout` ends that at the deadline.
CREATE OR REPLACE FUNCTION tuskline.wait_look(kind text, xid bigint, lake text, deadline timestamptz, ask boolean)
RETURNS boolean
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    held text;
    stages text[];
BEGIN
    SELECT string_agg(format('%s: %s: %s', b.name, b.stage, b.reason), '; ' ORDER BY b.name), array_agg(DISTINCT b.stage)
    INTO held, stages FROM tuskline.behind(xid, lake) AS b;
    IF held IS NULL OR ask OR clock_timestamp() >= deadline THEN
        PERFORM tuskline.check_waiter();
    END IF;
    IF held IS NULL THEN
        RETURN true;
    ELSIF clock_timestamp() >= deadline THEN
        RAISE EXCEPTION USING ERRCODE = 'TK001', MESSAGE = 'the transaction is not readable in the lake yet',
            DETAIL = held,
            HINT = CASE
                WHEN 'driver' = ANY (stages) THEN 'Check that `tuskline lake run` runs. If the lake no longer exists, have an administrator '
                    'delete its row in tuskline.lakes, or name the lake to wait for.'
                WHEN stages = '{tables}' THEN '`tuskline table list` shows the states of tables. Wait again, or have the tables paused that '
                    'need not be waited for.'
                ELSE '`tuskline status` shows the state of the log and the lake. Wait again, with a longer timeout.' END;
    ELSIF ask AND NOT tuskline.marks() THEN
        PERFORM set_config('lock_timeout', tuskline.milliseconds_until(deadline)::text, true)
        WHERE tuskline.milliseconds_until(deadline) < (
            SELECT coalesce(nullif(s.setting::bigint, 0), 2147483647) FROM pg_settings AS s WHERE s.name = 'lock_timeout');
        PERFORM set_config('synchronous_commit', 'local', true);
        PERFORM pg_notify(c.name, format('%s %s', kind, xid)) FROM tuskline.request_channel AS c;
    END IF;
    RETURN false;
END
$$;

-- The text of the error that COMMIT raises in a transaction block, in the server's language.
CREATE OR REPLACE FUNCTION tuskline.refused_commit() RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    COMMIT;
    RETURN NULL;
EXCEPTION WHEN invalid_transaction_termination THEN
    RETURN SQLERRM;
END
$$;

-- The wait itself. It has the caller's privileges and search_path, without which it could not COMMIT: so it contains nothing
-- but calls of what is above and of pg_catalog, and compares no values except by these.
CREATE OR REPLACE PROCEDURE tuskline.wait_for(kind text, token text, timeout interval, lake text)
LANGUAGE plpgsql AS $$
DECLARE
    xid pg_catalog.int8;
    deadline pg_catalog.timestamptz;
    turn pg_catalog.int4 := 0;
    may_commit pg_catalog.bool := true;
BEGIN
    BEGIN
        COMMIT;
    EXCEPTION WHEN invalid_transaction_termination THEN
        -- In a transaction block it is another error than in this block.
        may_commit := SQLERRM OPERATOR(pg_catalog.<>) tuskline.refused_commit();
    END;
    IF timeout IS NULL THEN
        RAISE EXCEPTION USING ERRCODE = 'invalid_parameter_value', MESSAGE = 'timeout must not be NULL',
            HINT = 'Pass an interval, such as ''60 s''.';
    END IF;
    IF NOT may_commit THEN
        RAISE EXCEPTION USING ERRCODE = 'active_sql_transaction',
            MESSAGE = 'cannot wait for the lake in a transaction block or a function',
            HINT = 'Run COMMIT first, and CALL the procedure by itself. A client library that begins transactions needs autocommit.';
    END IF;
    deadline := pg_catalog.clock_timestamp() OPERATOR(pg_catalog.+) timeout;
    LOOP
        BEGIN
            xid := tuskline.wait_begin(token);
            EXIT;
        EXCEPTION WHEN SQLSTATE 'TK006' THEN
            -- After a failover, the driver says which timelines the server comes from.
            IF pg_catalog.clock_timestamp() OPERATOR(pg_catalog.>=) deadline THEN
                RAISE;
            END IF;
        END;
        COMMIT;
        PERFORM pg_catalog.pg_sleep(0.1);
    END LOOP;
    -- Each step in a transaction of its own: none holds back VACUUM, and each sees what is reported by then.
    COMMIT;
    WHILE NOT tuskline.wait_look(kind, xid, lake, deadline, turn OPERATOR(pg_catalog.%) 40 OPERATOR(pg_catalog.=) 0) LOOP
        COMMIT;
        PERFORM tuskline.mark(kind, xid);
        PERFORM pg_catalog.pg_sleep(0.025);
        turn := turn OPERATOR(pg_catalog.+) 1;
    END LOOP;
END
$$;

CREATE OR REPLACE PROCEDURE tuskline.wait_flush(token text DEFAULT NULL, timeout interval DEFAULT '60 s', lake text DEFAULT NULL)
LANGUAGE plpgsql AS $$
BEGIN
    CALL tuskline.wait_for('flush', token, timeout, lake);
END
$$;

CREATE OR REPLACE PROCEDURE tuskline.wait_sync(token text DEFAULT NULL, timeout interval DEFAULT '600 s', lake text DEFAULT NULL)
LANGUAGE plpgsql AS $$
BEGIN
    CALL tuskline.wait_for('sync', token, timeout, lake);
END
$$;

-- The channel on which a lake's driver listens.
CREATE OR REPLACE FUNCTION tuskline.request_channel() RETURNS text
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM tuskline.check_source('listen for requests');
    RETURN (SELECT c.name FROM tuskline.request_channel AS c LIMIT 1);
END
$$;

-- The session that listens for a lake's driver, and the timelines of the server: {"timeline": 2, "ends": {"1": "0/3000060"}}.
-- The row has there, too, which server and database that is.
CREATE OR REPLACE FUNCTION tuskline.report_driver(lake text, stream text, publication text, timelines jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM tuskline.check_source('report a lake');
    INSERT INTO tuskline.lakes AS l (lake, stream, publication, driver, timelines)
    VALUES ($1, $2, $3, pg_backend_pid(), $4 || jsonb_build_object('database', tuskline.database()))
    ON CONFLICT ON CONSTRAINT lakes_pkey DO UPDATE
    SET publication = excluded.publication, driver = excluded.driver, timelines = excluded.timelines, at = clock_timestamp(),
        -- What was shown before may be of another server, or of epochs that the lake has lost since: a session that waits asks again.
        visible = NULL;
END
$$;

-- What a lake shows: everything that is visible in a snapshot of this timeline; or, without one, why it does not yet.
CREATE OR REPLACE FUNCTION tuskline.report_lake(
    lake text, stream text, timeline integer, visible txid_snapshot, epoch bigint, stage text, reason text) RETURNS void
LANGUAGE plpgsql VOLATILE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM tuskline.check_source('report a lake');
    UPDATE tuskline.lakes AS l
    SET timeline = coalesce($3, l.timeline), visible = coalesce($4, l.visible), epoch = coalesce($5, l.epoch),
        stage = $6, reason = $7, at = clock_timestamp()
    WHERE l.lake = $1 AND l.stream = $2;
    IF NOT FOUND THEN
        RAISE EXCEPTION USING ERRCODE = 'no_data_found', MESSAGE = 'the lake''s row in tuskline.lakes was deleted',
            HINT = 'The driver registers again.';
    END IF;
END
$$;

-- Who may call what, also where ALTER DEFAULT PRIVILEGES has taken EXECUTE from PUBLIC. The procedures have the caller's privileges, so
-- that their caller needs those of what they call. What tells or changes something checks the caller's role itself.
GRANT USAGE ON SCHEMA tuskline TO PUBLIC;
GRANT EXECUTE ON PROCEDURE tuskline.wait_flush(text, interval, text), tuskline.wait_sync(text, interval, text),
    tuskline.wait_for(text, text, interval, text) TO PUBLIC;
GRANT EXECUTE ON FUNCTION tuskline.flush_token(), tuskline.database(), tuskline.timeline(), tuskline.committed(text), tuskline.wait_begin(text),
    tuskline.wait_look(text, bigint, text, timestamptz, boolean), tuskline.mark(text, bigint), tuskline.marks(), tuskline.refused_commit(),
    tuskline.may_flush(oid), tuskline.request_channel(), tuskline.report_driver(text, text, text, jsonb),
    tuskline.report_lake(text, text, integer, txid_snapshot, bigint, text, text) TO PUBLIC;
REVOKE ALL ON FUNCTION tuskline.behind(bigint, text), tuskline.check_lake(text), tuskline.check_waiter(), tuskline.is_source(), tuskline.check_source(text),
    tuskline.milliseconds_until(timestamptz) FROM PUBLIC;
