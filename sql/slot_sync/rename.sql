-- Renames a proven copy to the name that clients use.
SELECT tuskline_slots.rename(%(name)s, %(new_name)s);
