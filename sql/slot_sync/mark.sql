-- A slot's marker, made with this value if it has none.
SELECT tuskline_slots.mark(%(slot)s, %(value)s);
