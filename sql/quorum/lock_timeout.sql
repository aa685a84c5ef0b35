-- A session that reads or writes the quorum's id must not wait for a COMMIT that waits for the quorum.
SET lock_timeout = '5s';
