-- The cluster's system identifier, which initdb gives it and every copy of its files keeps.
SELECT system_identifier::text FROM pg_control_system();
