ALTER ROLE {role} IN DATABASE {database} SET synchronous_commit = on;
