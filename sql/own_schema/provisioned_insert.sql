INSERT INTO tuskline.provisioned (slot, kind, name, privilege, grantee)
VALUES (%(slot)s, %(kind)s, %(name)s, %(privilege)s, %(grantee)s)
ON CONFLICT DO NOTHING;
