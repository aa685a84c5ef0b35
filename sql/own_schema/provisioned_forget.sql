DELETE FROM tuskline.made WHERE slot = %(slot)s;
