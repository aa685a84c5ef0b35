ALTER SYSTEM SET {name} = {value};
SELECT pg_reload_conf();
