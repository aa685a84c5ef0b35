-- Until the commit nobody writes to these tables. Writers wait behind this lock while it is waited for, so not for long, and
-- for less than deadlock_timeout: of a deadlock with a writer, the writer might be the victim.
SET LOCAL lock_timeout = '500ms';
LOCK TABLE {tables} IN SHARE ROW EXCLUSIVE MODE;
