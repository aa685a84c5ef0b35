-- `tuskline flush` and the copy mark moments in the log.
GRANT UPDATE ON TABLE {relation} TO {role};
