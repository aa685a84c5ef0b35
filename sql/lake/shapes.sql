-- The catalog state of each table of a publication (`spark_consumers.lake.tables.shape.Shape`), as far as its changes may
-- emit no replication message. Row versions (xmin) stand for what can change and change back. For partitions that are not
-- among `known` it reports whether their files are empty; for none if `known` is empty.
--
-- A column's row becomes JSON only if it has no missing value: that would be converted by its type's cast to json, which is code of the
-- type's owner. A generated column has none.
WITH RECURSIVE publication AS (
    SELECT p.oid, p.xmin::text AS version, p.puballtables, to_jsonb(p) AS facts,
           concat_ws(', ', CASE WHEN p.pubinsert THEN 'insert' END, CASE WHEN p.pubupdate THEN 'update' END,
                     CASE WHEN p.pubdelete THEN 'delete' END, CASE WHEN p.pubtruncate THEN 'truncate' END) AS operations
    FROM pg_publication AS p WHERE p.pubname = %(publication)s
), sent AS (
    SELECT n.nspname, c.relname, c.oid, c.relkind, c.relfilenode, c.relnatts,
           CASE WHEN c.relkind = 'f' THEN 'foreign' WHEN c.relpersistence <> 'p' THEN 'unlogged' ELSE '' END AS unlogged,
           to_jsonb(t) ->> 'rowfilter' AS row_filter,
           CASE WHEN jsonb_typeof(to_jsonb(t) -> 'attnames') = 'array' THEN to_jsonb(t) -> 'attnames' END AS names
    FROM pg_publication_tables AS t
    JOIN pg_namespace AS n ON n.nspname = t.schemaname
    JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = t.tablename
    WHERE t.pubname = %(publication)s
), links AS (
    -- A partition that DETACH ... CONCURRENTLY has begun to detach is no longer published through its parent.
    SELECT i.inhrelid, i.inhparent, i.xmin::text AS version, i.cmin::text::bigint AS command
    FROM pg_inherits AS i WHERE NOT coalesce((to_jsonb(i) ->> 'inhdetachpending')::bool, false)
), parts AS (
    SELECT s.oid AS root, i.inhrelid AS oid, i.inhparent AS parent, i.version AS link, i.command
    FROM sent AS s JOIN links AS i ON i.inhparent = s.oid WHERE s.relkind = 'p'
    UNION ALL
    SELECT p.root, i.inhrelid, i.inhparent, i.version, i.command
    FROM parts AS p JOIN pg_class AS c ON c.oid = p.oid AND c.relkind = 'p' JOIN links AS i ON i.inhparent = p.oid
), above AS (
    SELECT s.oid AS leaf, s.oid AS oid, ''::text AS path FROM sent AS s
    UNION ALL
    SELECT a.leaf, i.inhparent, concat(a.path, '/', i.version)
    FROM above AS a JOIN pg_class AS c ON c.oid = a.oid AND c.relispartition JOIN links AS i ON i.inhrelid = a.oid
), members AS (
    SELECT a.leaf, concat('table ', r.oid, a.path) AS entry, to_jsonb(r) ->> 'prattrs' AS columns
    FROM above AS a JOIN pg_publication_rel AS r ON r.prrelid = a.oid JOIN publication AS p ON p.oid = r.prpubid
    UNION ALL
    SELECT a.leaf, concat('schema ', r.oid, a.path), NULL
    FROM above AS a JOIN pg_class AS c ON c.oid = a.oid JOIN ({schemas}) AS r ON r.pnnspid = c.relnamespace
    JOIN publication AS p ON p.oid = r.pnpubid
    UNION ALL
    SELECT s.oid, 'all tables', NULL FROM sent AS s JOIN publication AS p ON p.puballtables
), types AS (
    -- Built-in types have no labels, no attributes that change, and output functions that nobody replaces.
    SELECT a.attrelid AS root, a.atttypid AS type
    FROM sent AS s JOIN pg_attribute AS a ON a.attrelid = s.oid
    WHERE a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 16384
    UNION
    SELECT y.root, n.type
    FROM types AS y JOIN pg_type AS t ON t.oid = y.type
    CROSS JOIN LATERAL (
        SELECT t.typbasetype WHERE t.typtype = 'd'
        UNION ALL
        SELECT t.typelem WHERE t.typelem <> 0
        UNION ALL
        SELECT a.atttypid FROM pg_attribute AS a
        WHERE t.typtype = 'c' AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL
        SELECT r.rngsubtype FROM pg_range AS r
        WHERE r.rngtypid = t.oid OR (to_jsonb(r) ->> 'rngmultitypid')::oid = t.oid
    ) AS n (type)
), missing AS (
    -- Only relations with rows of their own show that ADD COLUMN gave these a value.
    SELECT DISTINCT p.root, a.attname FROM parts AS p JOIN pg_attribute AS a ON a.attrelid = p.oid
    WHERE a.attnum > 0 AND a.atthasmissing AND NOT a.attisdropped
), identities AS (
    SELECT c.oid, CASE WHEN c.relreplident <> 'f' THEN ARRAY(
        SELECT a.attname::text
        FROM pg_index AS k JOIN pg_attribute AS a
            ON a.attrelid = k.indrelid AND a.attnum = ANY ((k.indkey::int2[])[0:k.indnkeyatts - 1])
        WHERE k.indrelid = c.oid AND k.indimmediate
          AND CASE c.relreplident WHEN 'i' THEN k.indisreplident WHEN 'd' THEN k.indisprimary END
        ORDER BY a.attnum) END AS columns
    FROM pg_class AS c
    WHERE c.oid IN (SELECT s.oid FROM sent AS s UNION SELECT p.oid FROM parts AS p)
)
SELECT s.nspname, s.relname, jsonb_build_object(
    'oid', s.oid::bigint,
    'file', s.relfilenode::bigint,
    -- The row of a system column is as old as the table: only a GRANT on that column would change it.
    'born', (SELECT a.xmin::text FROM pg_attribute AS a WHERE a.attrelid = s.oid AND a.attname = 'cmax'),
    'identity', to_jsonb(i.columns),
    'unsent', (
        SELECT coalesce(jsonb_agg(a.attname ORDER BY a.attnum), '[]')
        FROM pg_attribute AS a
        WHERE a.attrelid = s.oid AND a.attname::text = ANY (i.columns)
          AND (NOT s.names ? a.attname::text
               OR (CASE WHEN NOT a.atthasmissing THEN to_jsonb(a) ->> 'attgenerated' END <> '' AND NOT coalesce(s.names ? a.attname::text, false)))),
    'columns', (
        SELECT jsonb_agg(jsonb_build_array(a.attnum, a.attname, a.atttypid::bigint, a.xmin::text) ORDER BY a.attnum)
        FROM pg_attribute AS a WHERE a.attrelid = s.oid AND a.attnum > 0 AND NOT a.attisdropped),
    'natts', s.relnatts,
    'generated', (
        SELECT coalesce(jsonb_agg(a.attnum ORDER BY a.attnum), '[]')
        FROM pg_attribute AS a
        WHERE a.attrelid = s.oid AND a.attnum > 0 AND NOT a.attisdropped
          AND CASE WHEN NOT a.atthasmissing THEN to_jsonb(a) ->> 'attgenerated' END <> ''
          -- Before 18 a publication sends none.
          AND NOT coalesce(b.facts ? 'pubgencols' AND s.names ? a.attname::text, false)),
    'filled', (
        SELECT jsonb_agg(a.attnum)
        FROM pg_attribute AS a JOIN pg_type AS t ON t.oid = a.atttypid
        WHERE a.attrelid = s.oid AND a.attnum > 0 AND NOT a.attisdropped
          AND (a.attnotnull OR a.atthasdef OR a.atthasmissing OR t.typtype = 'd' OR t.typdefault IS NOT NULL
               OR (s.oid, a.attname) IN (SELECT m.root, m.attname FROM missing AS m))),
    'publication', concat(b.oid, ' ', b.version),
    'operations', b.operations,
    'via_root', coalesce((b.facts ->> 'pubviaroot')::bool, false),
    'unlogged', s.unlogged,
    'members', (SELECT jsonb_agg(m.entry ORDER BY m.entry) FROM members AS m WHERE m.leaf = s.oid),
    'column_list', (SELECT max(m.columns) FROM members AS m WHERE m.leaf = s.oid),
    'row_filter', s.row_filter,
    'labels', (
        SELECT jsonb_agg(jsonb_build_array(e.oid::bigint, e.enumlabel, e.xmin::text) ORDER BY e.oid)
        FROM types AS y JOIN pg_enum AS e ON e.enumtypid = y.type WHERE y.root = s.oid),
    'composites', (
        SELECT jsonb_agg(jsonb_build_array(t.oid::bigint, t.typname, (
            SELECT coalesce(string_agg(concat(a.attnum, ':', a.atttypid, ':', a.xmin), ' ' ORDER BY a.attnum), '')
            FROM pg_attribute AS a WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped)) ORDER BY t.oid)
        FROM types AS y JOIN pg_type AS t ON t.oid = y.type AND t.typtype = 'c' WHERE y.root = s.oid),
    -- The event trigger that records schema changes (sql/ddl/install.sql), if it does: another text after any change of it.
    'recorded', coalesce((
        SELECT concat_ws(' ', t.oid, t.xmin, f.oid, f.xmin, o.oid, (SELECT max(m.entry) FROM members AS m WHERE m.leaf = o.oid))
        FROM pg_event_trigger AS t JOIN pg_proc AS f ON f.oid = t.evtfoid
        JOIN sent AS o ON o.nspname = 'tuskline' AND o.relname = 'ddl'
        WHERE t.evtname = 'tuskline_ddl' AND t.evtenabled = 'A'), ''),
    'outputs', (
        SELECT jsonb_agg(jsonb_build_array(t.oid::bigint, t.typname, concat(f.oid, ' ', f.xmin)) ORDER BY t.oid)
        FROM types AS y JOIN pg_type AS t ON t.oid = y.type AND t.typtype = 'b'
        JOIN pg_proc AS f ON f.oid = t.typoutput AND f.oid >= 16384 WHERE y.root = s.oid),
    'parts', (
        SELECT jsonb_agg(jsonb_build_object(
            'oid', p.oid::bigint, 'parent', p.parent::bigint, 'link', p.link, 'file', c.relfilenode::bigint,
            'name', format('%%I.%%I', n.nspname, c.relname), 'identity', to_jsonb(d.columns),
            'unlogged', CASE WHEN c.relkind = 'f' THEN 'foreign' WHEN c.relpersistence <> 'p' THEN 'unlogged' ELSE '' END,
            -- It was created as a partition, so it had no rows before. ATTACH would have changed the row of each column
            -- that it has; those that were dropped before it stay. The command (cmin) of a row is not reliable after an
            -- attempt to change the row that was rolled back, which xmax shows.
            'born_here', p.link = a.xmin::text AND EXISTS (
                SELECT FROM pg_attribute AS u
                WHERE u.attrelid = p.oid AND u.attnum > 0 AND NOT u.attisdropped AND u.attinhcount > 0
                  AND u.xmin::text = a.xmin::text AND u.xmax::text = '0'
                  AND u.cmin::text::bigint < p.command)) ORDER BY p.oid)
        FROM parts AS p JOIN pg_class AS c ON c.oid = p.oid JOIN pg_namespace AS n ON n.oid = c.relnamespace
        JOIN identities AS d ON d.oid = p.oid
        -- The row of a system column is as old as the table.
        JOIN pg_attribute AS a ON a.attrelid = p.oid AND a.attnum = -1
        WHERE p.root = s.oid)
), ARRAY(
    SELECT p.oid::bigint FROM parts AS p
    WHERE p.root = s.oid AND cardinality(%(known)s::bigint[]) > 0 AND p.oid::bigint <> ALL (%(known)s::bigint[])
      AND pg_relation_size(p.oid) = 0
) AS empty, (
    CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_insert_lsn() END - '0/0') AS lsn
FROM sent AS s CROSS JOIN publication AS b JOIN identities AS i ON i.oid = s.oid
ORDER BY 1, 2;
