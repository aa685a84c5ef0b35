-- Which of these slots nobody streams from, and the database of each; the cluster's system identifier beside it.
SELECT s.slot_name, s.database, (SELECT system_identifier FROM pg_control_system()) AS system_id
FROM pg_replication_slots AS s
WHERE s.slot_name = ANY(%(slots)s) AND NOT s.active AND s.plugin = 'pgoutput'
ORDER BY s.slot_name;
