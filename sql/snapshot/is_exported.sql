-- Whether the session that exports a snapshot is there: so is its temporary slot, whose name no other one has.
SELECT slot_name::text FROM pg_replication_slots WHERE slot_name = {slot};
