ALTER PUBLICATION {publication} ADD TABLE {tables};
