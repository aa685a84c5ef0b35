-- A copy away.
SELECT tuskline_slots.drop(%(name)s);
