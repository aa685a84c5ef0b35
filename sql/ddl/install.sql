-- Writes each ALTER TABLE of a published table, and each other command that alters its columns, to the table tuskline.ddl in its own
-- transaction, so the log has, in commit order with the rows, what the columns of the table are from there on. Run as a superuser. The
-- row is deleted at once: nothing stays in the table, and nothing is locked that another session waits for. For PostgreSQL 11 and later.
CREATE SCHEMA IF NOT EXISTS tuskline;
DO $block$
BEGIN
    -- The function runs with the rights of this session's role, so no other may put a trigger on the table, or another table there.
    IF EXISTS (
        SELECT FROM pg_catalog.pg_namespace AS n LEFT JOIN pg_catalog.pg_class AS c
            ON c.relnamespace OPERATOR(pg_catalog.=) n.oid AND c.relname OPERATOR(pg_catalog.=) 'ddl'
        JOIN pg_catalog.pg_roles AS r ON r.oid OPERATOR(pg_catalog.=) n.nspowner
        LEFT JOIN pg_catalog.pg_roles AS o ON o.oid OPERATOR(pg_catalog.=) c.relowner
        WHERE n.nspname OPERATOR(pg_catalog.=) 'tuskline' AND NOT ((r.rolsuper OR r.rolname OPERATOR(pg_catalog.=) current_user)
                AND coalesce(o.rolsuper OR o.rolname OPERATOR(pg_catalog.=) current_user, true))
    ) THEN
        RAISE EXCEPTION 'schema tuskline, or the table tuskline.ddl, belongs to a role that is neither a superuser nor the current one'
            USING HINT = 'Have a superuser own the schema, and drop that table.';
    END IF;
    -- A function that is replaced keeps its owner, who could replace it again.
    IF EXISTS (
        SELECT FROM pg_catalog.pg_proc AS f JOIN pg_catalog.pg_namespace AS n ON n.oid OPERATOR(pg_catalog.=) f.pronamespace
        JOIN pg_catalog.pg_roles AS o ON o.oid OPERATOR(pg_catalog.=) f.proowner
        WHERE n.nspname OPERATOR(pg_catalog.=) 'tuskline' AND f.proname OPERATOR(pg_catalog.=) 'record_ddl'
          AND NOT (o.rolsuper OR o.rolname OPERATOR(pg_catalog.=) current_user)
    ) THEN
        RAISE EXCEPTION 'the function tuskline.record_ddl belongs to a role that is neither a superuser nor the current one'
            USING HINT = 'Drop that function.';
    END IF;
END
$block$;
CREATE TABLE IF NOT EXISTS tuskline.ddl (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    relation bigint NOT NULL,
    description text NOT NULL
);
COMMENT ON TABLE tuskline.ddl IS 'The event trigger tuskline_ddl writes schema changes here. Always empty, published.';
CREATE OR REPLACE FUNCTION tuskline.record_ddl() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp
-- A value is written here as in the log.
SET "TimeZone" = 'UTC' SET "DateStyle" = 'ISO, YMD' SET "IntervalStyle" = 'postgres' SET extra_float_digits = 3 SET bytea_output = 'hex'
SET lc_monetary = 'C' SET quote_all_identifiers = off SET array_nulls = on AS $function$
DECLARE
    altered oid;
    made bigint;
    schemas jsonb := '[]';
    version text;
    ahead bigint;
    own text[];
BEGIN
    -- pg_publication_tables would lock all published tables, and so wait for others' DDL.
    IF to_regclass('pg_catalog.pg_publication_namespace') IS NOT NULL THEN
        EXECUTE 'SELECT coalesce(jsonb_agg(jsonb_build_array(s.pnpubid::bigint, s.pnnspid::bigint)), ''[]'')
                 FROM pg_publication_namespace AS s' INTO schemas;
    END IF;
    FOR altered IN
        -- A change of columns is one of the columns of what inherits from the table, or is a table of the type, too.
        WITH RECURSIVE commands AS (
            SELECT c.objid FROM pg_event_trigger_ddl_commands() AS c WHERE c.classid = 'pg_class'::regclass
            UNION
            SELECT d.oid FROM commands AS c JOIN (
                SELECT i.inhparent, i.inhrelid FROM pg_inherits AS i
                UNION ALL
                SELECT y.typrelid, k.oid FROM pg_class AS k JOIN pg_type AS y ON y.oid = k.reloftype
            ) AS d (above, oid) ON d.above = c.objid
        ), above AS (
            SELECT t.oid AS leaf, t.oid FROM commands AS c JOIN pg_class AS t ON t.oid = c.objid
            WHERE t.relkind IN ('r', 'p') AND t.relpersistence = 'p' AND t.relnamespace <> 'tuskline'::regnamespace
              AND t.oid >= 16384
            UNION ALL
            SELECT a.leaf, i.inhparent
            FROM above AS a JOIN pg_class AS k ON k.oid = a.oid AND k.relispartition JOIN pg_inherits AS i ON i.inhrelid = a.oid
        )
        SELECT DISTINCT a.leaf FROM above AS a JOIN pg_class AS t ON t.oid = a.oid JOIN pg_publication AS p
            -- A publication may send a partition as its root alone.
            ON CASE WHEN (to_jsonb(p) ->> 'pubviaroot')::bool THEN a.leaf = a.oid AND NOT (t.relispartition AND p.puballtables)
                    ELSE true END
        WHERE p.puballtables
           OR EXISTS (SELECT FROM pg_publication_rel AS r WHERE r.prpubid = p.oid AND r.prrelid = a.oid)
           OR EXISTS (SELECT FROM jsonb_array_elements(schemas) AS s
                      WHERE (s ->> 0)::oid = p.oid AND (s ->> 1)::oid = t.relnamespace)
    LOOP
        -- The row versions of this transaction and its subtransactions, whose IDs are not before its own.
        own := '{}';
        FOR version IN SELECT DISTINCT a.xmin::text FROM pg_attribute AS a WHERE a.attrelid = altered AND a.attnum > 0 LOOP
            ahead := ((version::bigint - txid_current()) % 4294967296 + 4294967296) % 4294967296;
            CONTINUE WHEN version::bigint < 3 OR ahead >= 2147483648;
            BEGIN
                IF txid_status(txid_current() + ahead) = 'in progress' THEN
                    own := own || version;
                END IF;
            EXCEPTION WHEN invalid_parameter_value THEN
                -- No transaction has that ID yet: the row is frozen, and has one of the last round of IDs.
                NULL;
            END;
        END LOOP;
        CONTINUE WHEN own = '{}';
        INSERT INTO tuskline.ddl (relation, description)
        WITH RECURSIVE parts AS (
            SELECT altered AS oid
            UNION
            SELECT i.inhrelid FROM pg_inherits AS i JOIN parts AS p ON p.oid = i.inhparent
        )
        SELECT altered::bigint, jsonb_build_object(
            'name', t.relname,
            'file', t.relfilenode::bigint,
            'natts', t.relnatts,
            -- Of one ALTER TABLE alone: other text may be secret.
            'query', CASE WHEN current_query() ~* '^\s*alter\s+table\s' AND length(current_query()) < 2000
                               AND position(';' IN rtrim(current_query(), E'; \t\r\n')) = 0 THEN current_query() ELSE '' END,
            'columns', (
                SELECT jsonb_agg(jsonb_build_array(
                    a.attnum, CASE WHEN a.attisdropped THEN NULL ELSE a.attname END, a.atttypid::bigint, a.atttypmod, a.xmin::text,
                    -- Whether this transaction, or a subtransaction of it, has written the row of the column.
                    a.xmin::text = ANY (own),
                    -- Whether a row may have a value in the column that no change has carried.
                    a.attnotnull OR a.atthasdef OR coalesce(y.typtype = 'd' OR y.typdefault IS NOT NULL, false) OR EXISTS (
                        SELECT FROM parts AS p JOIN pg_attribute AS m ON m.attrelid = p.oid
                        WHERE m.attname = a.attname AND m.attnum > 0 AND m.atthasmissing),
                    -- A missing value as JSON runs its type's cast to json, which another role may have made, with this function's
                    -- rights. A generated column has none.
                    coalesce(CASE WHEN NOT a.atthasmissing THEN to_jsonb(a) ->> 'attgenerated' END, '') <> '',
                    -- The value that a new column has in all older rows, if it is known and short.
                    CASE WHEN a.xmin::text = ANY (own) AND a.atthasdef AND y.typtype <> 'd' THEN (
                        SELECT CASE WHEN count(*) = count(m.texts) AND max(cardinality(m.texts)) = 1 AND count(DISTINCT m.texts[1]) = 1
                                         AND max(length(m.texts[1])) <= 1000 THEN max(m.texts[1]) END
                        FROM parts AS p JOIN pg_class AS k ON k.oid = p.oid AND k.relkind <> 'p' AND (t.relkind = 'p' OR k.oid = t.oid)
                        LEFT JOIN LATERAL (
                            SELECT n.attmissingval::text::text[] AS texts FROM pg_attribute AS n
                            WHERE n.attrelid = p.oid AND n.attname = a.attname AND n.atthasmissing AND NOT n.attisdropped
                        ) AS m ON true) END) ORDER BY a.attnum)
                FROM pg_attribute AS a LEFT JOIN pg_type AS y ON y.oid = a.atttypid
                WHERE a.attrelid = t.oid AND a.attnum > 0))::text
        FROM pg_class AS t WHERE t.oid = altered
        RETURNING id INTO made;
        DELETE FROM tuskline.ddl WHERE id = made;
    END LOOP;
EXCEPTION WHEN OTHERS THEN
    -- The command goes on. The lake compares the catalog, and copies the table again.
    RAISE LOG 'tuskline: a schema change is not recorded: % (%)', SQLERRM, SQLSTATE;
END
$function$;
REVOKE ALL ON FUNCTION tuskline.record_ddl() FROM PUBLIC;
DROP EVENT TRIGGER IF EXISTS tuskline_ddl;
CREATE EVENT TRIGGER tuskline_ddl ON ddl_command_end
    -- The others can rename a column of a table, or change the columns of a table of a type, or of one below a foreign table.
    WHEN TAG IN ('ALTER TABLE', 'ALTER VIEW', 'ALTER MATERIALIZED VIEW', 'ALTER FOREIGN TABLE', 'ALTER TYPE')
    EXECUTE PROCEDURE tuskline.record_ddl();
-- Also where session_replication_role is replica.
ALTER EVENT TRIGGER tuskline_ddl ENABLE ALWAYS;
