CREATE PUBLICATION {publication} FOR TABLE {tables};
