-- Which publication the slot begins with.
INSERT INTO tuskline.provisioned (slot, kind, name, grantee)
SELECT {slot_value}, 'publication oid', pubname, oid::text FROM pg_publication WHERE pubname = {name_value}
ON CONFLICT DO NOTHING;
