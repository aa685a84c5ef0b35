-- End the session in which capture streams from its slot; a session of anybody else goes on.
SELECT pg_terminate_backend(a.pid)
FROM pg_replication_slots AS s JOIN pg_stat_activity AS a ON a.pid = s.active_pid
WHERE s.slot_name = %(slot)s AND s.database = current_database() AND a.application_name = %(capture)s;
