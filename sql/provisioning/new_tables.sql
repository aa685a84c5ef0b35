-- Who owns the tables of a source's publication, by schema, where tables that the owner makes there later are not readable by
-- the role %(role)s; and whether there is a group that may read all (14 and later). Nothing for a role that may.
SELECT DISTINCT o.rolname AS owner, n.nspname AS schema, EXISTS (
    SELECT FROM pg_roles AS g WHERE g.rolname = 'pg_read_all_data') AS has_group
FROM pg_publication_tables AS t
JOIN pg_namespace AS n ON n.nspname = t.schemaname
JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = t.tablename
JOIN pg_roles AS o ON o.oid = c.relowner
JOIN pg_roles AS r ON r.rolname = %(role)s
WHERE t.pubname = %(publication)s AND n.nspname <> 'tuskline' AND NOT r.rolsuper AND NOT pg_has_role(r.oid, o.oid, 'USAGE')
  AND NOT EXISTS (
      SELECT FROM pg_roles AS g WHERE g.rolname = 'pg_read_all_data' AND pg_has_role(r.oid, g.oid, 'USAGE'))
  AND NOT EXISTS (
      SELECT FROM pg_default_acl AS d CROSS JOIN LATERAL aclexplode(d.defaclacl) AS x
      WHERE d.defaclrole = o.oid AND d.defaclnamespace IN (0, n.oid) AND d.defaclobjtype = 'r'
        AND x.privilege_type = 'SELECT' AND (x.grantee = 0 OR pg_has_role(r.oid, x.grantee, 'USAGE')))
ORDER BY 1, 2;
