-- Sets the three fields of a copy together.
SELECT tuskline_slots.set_fields(%(name)s, %(restart_lsn)s, %(confirmed_flush_lsn)s, %(catalog_xmin)s::text::xid,
                                 %(may_go_back)s);
