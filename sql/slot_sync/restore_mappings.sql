-- Restores from WAL the mapping files that a slot may need; returns the position up to which WAL was read.
SELECT tuskline_slots.restore_mappings(%(name)s)::text;
