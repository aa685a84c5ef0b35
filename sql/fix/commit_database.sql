ALTER DATABASE {database} SET synchronous_commit = on;
