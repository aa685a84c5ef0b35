-- What the configuration files give a setting, which the server takes on with its next reload or restart; no row: nothing.
SELECT setting FROM pg_file_settings
WHERE lower(name) = %(name)s AND error IS NULL
ORDER BY seqno DESC LIMIT 1;
