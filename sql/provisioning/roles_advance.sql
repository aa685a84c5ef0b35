GRANT EXECUTE ON FUNCTION pg_catalog.pg_replication_slot_advance(name, pg_lsn) TO {role};
