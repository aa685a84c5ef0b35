-- Disables the timeouts that a role or database may have set, for the session that exports a snapshot: it waits for running
-- transactions, and its own is then idle for as long as a copy takes. Which settings exist depends on the major version.
SELECT set_config(name, '0', false) FROM pg_settings
WHERE name IN ('idle_in_transaction_session_timeout', 'lock_timeout', 'statement_timeout', 'transaction_timeout');
