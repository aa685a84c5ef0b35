REVOKE pg_read_all_stats FROM {role};
