INSERT INTO tuskline.provisioned (slot, kind, name, privilege, grantee)
VALUES ({slot_value}, {kind_value}, {name_value}, {privilege_value}, {grantee_value}) ON CONFLICT DO NOTHING;
