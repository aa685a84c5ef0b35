SELECT pg_create_physical_replication_slot({slot_value}, true);
