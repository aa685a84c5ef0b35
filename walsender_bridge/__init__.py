"""Everything in Tuskline that speaks PostgreSQL replication: capture, change log, bridge."""
