-- Whether anything else of this database has a record of the same thing.
SELECT EXISTS (SELECT FROM tuskline.provisioned WHERE slot <> %(slot)s AND kind = %(kind)s AND name = %(name)s);
