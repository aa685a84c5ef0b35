-- A setting's value, and where it comes from.
SELECT setting, source FROM pg_settings WHERE name = %(name)s;
