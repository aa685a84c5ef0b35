-- Release the WAL that every safekeeper has. The slot never moves backward.
SELECT pg_catalog.pg_replication_slot_advance(slot_name, %(lsn)s::pg_catalog.pg_lsn)
FROM pg_catalog.pg_replication_slots
WHERE slot_name = %(slot)s AND restart_lsn < %(lsn)s::pg_catalog.pg_lsn;
