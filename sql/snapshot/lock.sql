-- The lock blocks TRUNCATE, rewrites and renames of the relation and its columns until the transaction ends; check.sql
-- detects earlier ones.
LOCK TABLE ONLY {relation} IN ACCESS SHARE MODE;
