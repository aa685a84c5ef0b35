-- What is shown of slots, and their incarnation ids.
SELECT slot_name FROM pg_create_physical_replication_slot('regress_tuskline_physical', true);
SELECT slot_name FROM pg_create_logical_replication_slot('regress_tuskline_logical', 'pgoutput');
SELECT i.slot_name, i.plugin, i.database = current_database() AS here, i.active_pid, i.persistency,
       i.restart_lsn = s.restart_lsn AS restart_lsn,
       i.confirmed_flush_lsn IS NOT DISTINCT FROM s.confirmed_flush_lsn AS confirmed_flush_lsn,
       i.catalog_xmin::text IS NOT DISTINCT FROM s.catalog_xmin::text AS catalog_xmin,
       i.effective_catalog_xmin::text IS NOT DISTINCT FROM i.catalog_xmin::text AS effective,
       i.saved_restart_lsn = i.restart_lsn AS saved, i.two_phase, i.synced, i.invalidation, i.wal_present, i.marker
FROM tuskline_slots.inspect() AS i JOIN pg_replication_slots AS s USING (slot_name)
WHERE i.slot_name LIKE 'regress%' ORDER BY 1;
SELECT tuskline_slots.mark('regress_tuskline_physical', 'first');
SELECT tuskline_slots.mark('regress_tuskline_physical', 'second');
SELECT marker FROM tuskline_slots.inspect('regress_tuskline_physical');
SELECT tuskline_slots.marker('regress_tuskline_logical');
SELECT tuskline_slots.mark('regress_tuskline_logical', 'x');
SELECT tuskline_slots.marker('regress_tuskline_logical');
SELECT tuskline_slots.mark('regress_tuskline_physical', E'two\nlines');
SELECT tuskline_slots.mark('regress_tuskline_physical', repeat('x', 65));
-- It is of this slot: another one of its name has none.
SELECT pg_drop_replication_slot('regress_tuskline_physical');
SELECT slot_name FROM pg_create_physical_replication_slot('regress_tuskline_physical');
SELECT marker FROM tuskline_slots.inspect('regress_tuskline_physical');
SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name LIKE 'regress%';
