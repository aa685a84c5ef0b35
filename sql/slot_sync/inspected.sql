-- Each slot as the extension shows it (`tuskline_slots.inspect`).
SELECT to_json(f) AS slot FROM tuskline_slots.inspect() AS f
