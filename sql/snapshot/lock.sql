-- The lock keeps TRUNCATE, rewrites and new names of the relation and its columns away until the transaction ends;
-- what came before it is seen by snapshot_check.
LOCK TABLE ONLY {relation} IN ACCESS SHARE MODE;
