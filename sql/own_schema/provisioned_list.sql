-- What was made for the source with this slot.
SELECT kind, name, privilege, grantee FROM tuskline.provisioned WHERE slot = %(slot)s ORDER BY kind, name, privilege;
