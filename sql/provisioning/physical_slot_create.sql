-- It keeps WAL from now on, and nobody streams from it.
SELECT pg_create_physical_replication_slot(%(slot)s, true);
