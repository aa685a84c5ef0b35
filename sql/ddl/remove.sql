-- Schema changes are not recorded any more. Run as a superuser.
DROP EVENT TRIGGER IF EXISTS tuskline_ddl;
DROP FUNCTION IF EXISTS tuskline.record_ddl();
DROP TABLE IF EXISTS tuskline.ddl;
