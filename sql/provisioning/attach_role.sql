-- A role's attributes; no row when there is none.
SELECT rolcanlogin, rolreplication OR rolsuper, has_database_privilege(oid, current_database(), 'CONNECT')
FROM pg_roles WHERE rolname = %(role)s;
