-- It sees what the proposer has reported, and how many commits wait.
GRANT pg_read_all_stats TO {role};
