ALTER ROLE {role} SET synchronous_commit = on;
