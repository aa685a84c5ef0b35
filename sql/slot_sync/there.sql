-- Whether there is a slot of that name.
SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = %(name)s);
