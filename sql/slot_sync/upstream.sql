-- Identifies the server that a standby streams from.
SELECT jsonb_build_object(
    'system_id', (SELECT system_identifier::text FROM pg_control_system()),
    'in_recovery', pg_is_in_recovery(),
    'postmaster_start', round(extract(epoch FROM pg_postmaster_start_time()) * 1000000)::bigint
);
