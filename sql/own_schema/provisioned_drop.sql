-- Our own two tables. The schema goes by a statement of its own, if we made it, and without CASCADE.
DROP TABLE tuskline.flush, tuskline.provisioned;
