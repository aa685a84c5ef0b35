-- Advances a copy to a position by decoding, in the slot's database; returns its new position.
SELECT tuskline_slots.advance(%(name)s, %(lsn)s::pg_lsn)::text;
