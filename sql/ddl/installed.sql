-- Whether schema changes are recorded (install.sql): by an event trigger that always fires, into a table of the publication.
SELECT EXISTS (
    SELECT FROM pg_event_trigger AS t JOIN pg_proc AS f ON f.oid = t.evtfoid JOIN pg_namespace AS n ON n.oid = f.pronamespace
    WHERE t.evtname = 'tuskline_ddl' AND t.evtenabled = 'A' AND n.nspname = 'tuskline'
) AS recorded, EXISTS (
    SELECT FROM pg_publication_tables AS t
    WHERE t.pubname = %(publication)s AND t.schemaname = 'tuskline' AND t.tablename = 'ddl'
) AS published;
