-- A copy's decoder to a position, in the slot's database; where it is then.
SELECT end_lsn::text FROM pg_replication_slot_advance(%(name)s, %(lsn)s::pg_lsn);
