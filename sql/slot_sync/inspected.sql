-- Each slot as the extension shows it.
SELECT to_json(f) AS slot FROM tuskline_slots.inspect() AS f
