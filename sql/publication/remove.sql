ALTER PUBLICATION {publication} DROP TABLE {tables};
