-- Whoever sets or frees what commits wait for must not wait for it.
SET synchronous_commit = local;
