DELETE FROM tuskline.made WHERE slot = %(slot)s AND kind = %(kind)s AND name = %(name)s;
