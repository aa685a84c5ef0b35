-- So that `tuskline detach` takes these back.
INSERT INTO tuskline.made (slot, kind, name)
VALUES ({slot_value}, 'publication', {publication_value}), ('', 'schema', 'tuskline')
ON CONFLICT DO NOTHING;
