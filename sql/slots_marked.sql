-- What only the extension shows of a primary's slots: the markers of the physical ones, and where two_phase began. No file of
-- any other slot is read for it. Before 14 the view has no two_phase, and the one of `older` is meant.
SELECT to_json(f) AS slot
FROM pg_replication_slots AS s, LATERAL tuskline_slots.inspect(s.slot_name) AS f
WHERE s.slot_type = 'physical'
UNION ALL
SELECT to_json(f) FROM tuskline_slots.inspect() AS f
WHERE f.two_phase
  AND (SELECT bool_or(found.two_phase) FROM (SELECT false AS two_phase) AS older,
       LATERAL (SELECT two_phase FROM pg_replication_slots) AS found)
