-- Mapping files that a slot may need, from WAL; up to where that was read.
SELECT tuskline_slots.restore_mappings(%(name)s)::text;
