-- This server would leave out the tables' changes if they were published while somebody writes to them.
BEGIN;
LOCK TABLE {locked} IN SHARE ROW EXCLUSIVE MODE;
ALTER PUBLICATION {publication} ADD TABLE {tables};
COMMIT;
