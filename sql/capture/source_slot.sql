-- A slot as one JSON object: which columns there are depends on the server's version.
SELECT to_jsonb(s) FROM pg_replication_slots s WHERE s.slot_name = %(slot)s;
