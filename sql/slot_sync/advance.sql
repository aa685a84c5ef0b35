-- A copy's decoder to a position, in the slot's database; where it is then.
SELECT tuskline_slots.advance(%(name)s, %(lsn)s::pg_lsn)::text;
