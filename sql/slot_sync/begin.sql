-- Settings of a session that reads or moves slots: time limits, and no wait for a synchronous standby.
SELECT set_config('statement_timeout', %(timeout)s, false), set_config('lock_timeout', '5s', false),
       set_config('synchronous_commit', 'local', false);
