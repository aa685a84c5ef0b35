-- The initial copy reads the table, and each partition by itself.
GRANT SELECT ON TABLE {relation} TO {role};
