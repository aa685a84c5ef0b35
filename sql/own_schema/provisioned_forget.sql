DELETE FROM tuskline.provisioned WHERE slot = %(slot)s;
