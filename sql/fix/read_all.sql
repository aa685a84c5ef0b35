GRANT pg_read_all_data TO {role};
