-- Of these server processes: those of roles that may write to a published table.
SELECT a.pid FROM pg_stat_activity AS a WHERE a.pid = ANY (%(pids)s) AND tuskline.may_flush(a.usesysid);
