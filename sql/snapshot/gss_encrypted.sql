-- Whether this session is encrypted by GSSAPI.
SELECT coalesce((SELECT encrypted FROM pg_stat_gssapi WHERE pid = pg_backend_pid()), false);
