-- Drops a slot of a standby: a copy, or any slot that is known to be an old primary's.
SELECT tuskline_slots.drop(%(name)s, %(any_slot)s);
