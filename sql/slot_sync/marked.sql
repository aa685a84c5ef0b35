-- What only the extension shows of a primary's slots: their incarnation ids (`marker`), and where two_phase began. No
-- file of any other slot is read. Before 14 the view has no two_phase, and the column resolves to that of `older`.
SELECT to_json(f) AS slot
FROM pg_replication_slots AS s, LATERAL tuskline_slots.inspect(s.slot_name) AS f
WHERE s.slot_type = 'physical'
UNION ALL
SELECT json_build_object('slot_name', s.slot_name, 'marker', tuskline_slots.marker(s.slot_name))
FROM pg_replication_slots AS s
WHERE s.slot_type = 'logical' AND NOT s.temporary
UNION ALL
SELECT to_json(f) FROM tuskline_slots.inspect() AS f
WHERE f.two_phase
  AND (SELECT bool_or(found.two_phase) FROM (SELECT false AS two_phase) AS older,
       LATERAL (SELECT two_phase FROM pg_replication_slots) AS found)
