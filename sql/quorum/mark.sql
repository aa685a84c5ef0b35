-- A commit of its own: when the quorum has it, the quorum works.
SELECT pg_logical_emit_message(true, 'tuskline', '');
