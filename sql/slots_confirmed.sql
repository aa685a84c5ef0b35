-- Where a copy's client would go on.
SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %(name)s;
