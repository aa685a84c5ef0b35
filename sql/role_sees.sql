-- Whether a role sees what other people's sessions do; no row when there is no such role.
SELECT pg_has_role(rolname, 'pg_read_all_stats', 'USAGE') FROM pg_roles WHERE rolname = %(role)s;
