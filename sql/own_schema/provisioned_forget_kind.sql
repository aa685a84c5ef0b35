DELETE FROM tuskline.provisioned WHERE slot = %(slot)s AND kind = %(kind)s AND name = %(name)s;
