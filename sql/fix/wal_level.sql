ALTER SYSTEM SET wal_level = 'logical';
-- wal_level takes effect when the server is restarted.
