-- A slot of a standby away: a copy, or any slot that is known to be an old primary's.
SELECT tuskline_slots.drop(%(name)s, %(any_slot)s);
