-- Whether this session is the one controller of this database's server, from now on until it ends.
SELECT pg_try_advisory_lock(1414747979, 1);
