-- The first words of a transaction that reads one part of a snapshot. The lock keeps TRUNCATE and rewrites
-- away until it ends; what came before it is seen by snapshot_check.
SET TRANSACTION SNAPSHOT {snapshot};
LOCK TABLE ONLY {relation} IN ACCESS SHARE MODE;
