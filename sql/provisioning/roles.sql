-- The role that a source's DSN names: it may log in and replicate, and nothing else. What it may read is
-- granted table by table (roles_table, roles_schema), what it may write is one row (roles_flush).
CREATE ROLE {role} LOGIN REPLICATION PASSWORD {password};
