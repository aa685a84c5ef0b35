-- A transaction of its own: its COMMIT returns if the quorum works.
SELECT pg_logical_emit_message(true, 'tuskline', '');
