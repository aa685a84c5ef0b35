-- No timeout of the role's or the database's ends the session that exports a snapshot: it waits for the transactions that run,
-- and its own is idle then for as long as a copy takes. Which of these there are depends on the major.
SELECT set_config(name, '0', false) FROM pg_settings
WHERE name IN ('idle_in_transaction_session_timeout', 'lock_timeout', 'statement_timeout', 'transaction_timeout');
