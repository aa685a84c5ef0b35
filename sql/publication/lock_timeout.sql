-- Publishing a table waits for VACUUM and DDL of it, and what waits for that table waits meanwhile, too.
SET LOCAL lock_timeout = '5s';
