-- Whether a slot of that name exists.
SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = %(name)s);
