-- A slot's incarnation id (the extension's `marker`), written with this value if it has none.
SELECT tuskline_slots.mark(%(slot)s, %(value)s);
