-- It sees what the proposer has reported, how many commits wait, and what streams from a candidate's slot.
GRANT pg_read_all_stats TO {role};
