-- Who owns the schema tuskline and the tables in it, and whether this session may use them whatever the owner has done to
-- them: a trigger, a default or a view runs with the rights of the session, and SET ROLE does not lessen these. An
-- ordinary role trusts, besides superusers, those who administer it or its database.
WITH own AS (
    SELECT 'schema tuskline'::text AS name, nspowner AS owner FROM pg_namespace WHERE nspname = 'tuskline'
    UNION ALL
    SELECT concat('tuskline.', c.relname), c.relowner
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
    WHERE n.nspname = 'tuskline' AND c.relname IN ('flush', 'provisioned')
)
SELECT own.name, r.rolname::text,
       r.oid = me.oid OR r.rolsuper OR (NOT me.rolsuper AND (
           r.rolname = current_user OR r.rolcreaterole OR r.oid = d.datdba OR pg_has_role(r.oid, me.oid, 'MEMBER'))),
       me.rolsuper, me.rolname::text
FROM own JOIN pg_roles AS r ON r.oid = own.owner
JOIN pg_roles AS me ON me.rolname = session_user
JOIN pg_database AS d ON d.datname = current_database()
ORDER BY 1;
