-- Each slot as the extension shows it.
SELECT to_jsonb(f) AS slot FROM tuskline_slots.inspect() AS f
