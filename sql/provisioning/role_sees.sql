-- Whether a role sees what other people's sessions do, whether it is this session's, and whether this session may let it.
-- No row when there is no such role.
SELECT pg_has_role(rolname, 'pg_read_all_stats', 'USAGE'), rolname = current_user,
       (SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
FROM pg_roles WHERE rolname = %(role)s;
