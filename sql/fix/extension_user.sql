GRANT tuskline_slots TO {role};
