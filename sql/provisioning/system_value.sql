-- What ALTER SYSTEM has set it to; no row: it has not. The file of that name is always read last.
SELECT setting FROM pg_file_settings
WHERE name = %(name)s AND sourcefile LIKE '%%postgresql.auto.conf'
ORDER BY seqno DESC LIMIT 1;
