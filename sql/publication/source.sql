-- A publication as one JSON object: which columns there are depends on the server's version. Beside them: whether Tuskline
-- has made it, whether the session may act as its owner, whether it publishes schemas (15 and later).
SELECT to_jsonb(p) || jsonb_build_object(
    'oid', p.oid::bigint,
    'ours', coalesce(obj_description(p.oid, 'pg_publication') LIKE 'Belongs to Tuskline%%', false),
    'owned', pg_has_role(p.pubowner, 'USAGE'),
    'schemas', EXISTS (
        SELECT FROM pg_depend AS d JOIN pg_class AS c ON c.oid = d.classid AND c.relname = 'pg_publication_namespace'
        WHERE d.refclassid = 'pg_publication'::regclass AND d.refobjid = p.oid))
FROM pg_publication AS p WHERE p.pubname = %(publication)s;
