-- A session that changes what commits wait for must not wait for it itself.
SET synchronous_commit = local;
