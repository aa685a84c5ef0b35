-- Sets whether PostgreSQL's own slot synchronization covers the slot that a copy becomes with a promotion.
SELECT tuskline_slots.set_failover(%(name)s, %(failover)s);
