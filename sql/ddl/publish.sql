-- The records get into the log like any other rows.
ALTER PUBLICATION {publication} ADD TABLE tuskline.ddl;
