-- How many of these logical slots this standby (17 and later) has, ready to be used after its promotion.
SELECT count(*) FROM pg_replication_slots
WHERE slot_name = ANY (%(slots)s) AND synced AND NOT temporary AND invalidation_reason IS NULL;
