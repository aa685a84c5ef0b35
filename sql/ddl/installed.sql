-- Whether schema changes are recorded (install.sql): by an event trigger that always fires, into a table of the publication. And whether
-- the function is this version's, if there is one: an earlier one may run code of other roles with its owner's rights.
SELECT EXISTS (
    SELECT FROM pg_event_trigger AS t JOIN pg_proc AS f ON f.oid = t.evtfoid JOIN pg_namespace AS n ON n.oid = f.pronamespace
    WHERE t.evtname = 'tuskline_ddl' AND t.evtenabled = 'A' AND n.nspname = 'tuskline'
) AS recorded, EXISTS (
    SELECT FROM pg_publication_tables AS t
    WHERE t.pubname = %(publication)s AND t.schemaname = 'tuskline' AND t.tablename = 'ddl'
) AS published, NOT EXISTS (
    -- Its text, whose names mean the catalog's only with this search_path; and an owner who may own event triggers.
    SELECT FROM pg_proc AS f JOIN pg_namespace AS n ON n.oid = f.pronamespace JOIN pg_roles AS o ON o.oid = f.proowner
    WHERE n.nspname = 'tuskline' AND f.proname = 'record_ddl' AND f.pronargs = 0 AND NOT (
        f.prosrc = %(body)s AND f.prosecdef AND coalesce('search_path=pg_catalog, pg_temp' = ANY (f.proconfig), false)
        AND (o.rolsuper OR EXISTS (
            SELECT FROM pg_event_trigger AS t WHERE t.evtname = 'tuskline_ddl' AND t.evtowner = f.proowner)))
) AS is_current;
