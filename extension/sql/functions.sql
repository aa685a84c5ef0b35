-- What CREATE EXTENSION makes, and who may use it.
SELECT p.oid::regprocedure AS function, l.lanname AS language, p.provolatile AS volatile, p.proparallel AS parallel,
       obj_description(p.oid, 'pg_proc') IS NOT NULL AS described
FROM pg_proc AS p JOIN pg_language AS l ON l.oid = p.prolang
WHERE p.pronamespace = 'tuskline_slots'::regnamespace
ORDER BY p.proname;
SELECT p.proname, r.rolname AS grantee, a.privilege_type
FROM pg_proc AS p, aclexplode(p.proacl) AS a LEFT JOIN pg_roles AS r ON r.oid = a.grantee
WHERE p.pronamespace = 'tuskline_slots'::regnamespace AND a.grantee <> p.proowner
ORDER BY p.proname;
SELECT rolname, rolcanlogin, rolsuper, rolreplication FROM pg_roles WHERE rolname = 'tuskline_slots';
CREATE ROLE regress_tuskline_nobody;
SET ROLE regress_tuskline_nobody;
SELECT count(*) >= 0 AS allowed FROM tuskline_slots.inspect();
RESET ROLE;
GRANT tuskline_slots TO regress_tuskline_nobody;
SET ROLE regress_tuskline_nobody;
SELECT count(*) >= 0 AS allowed FROM tuskline_slots.inspect();
RESET ROLE;
DROP ROLE regress_tuskline_nobody;
-- The same under a search_path that has something else of every name first.
CREATE SCHEMA regress_tuskline_hostile
    CREATE VIEW pg_replication_slots AS SELECT 1 AS hostile;
SET search_path = regress_tuskline_hostile, pg_catalog;
SELECT count(*) >= 0 AS allowed FROM tuskline_slots.inspect();
RESET search_path;
DROP SCHEMA regress_tuskline_hostile CASCADE;
