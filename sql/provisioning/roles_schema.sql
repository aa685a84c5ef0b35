GRANT USAGE ON SCHEMA {name} TO {role};
