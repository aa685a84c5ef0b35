ALTER PUBLICATION {publication} SET (publish = 'insert, update, delete, truncate');
