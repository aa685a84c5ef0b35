-- A session that looks at slots or moves them: nothing in it waits for long, and what it sets waits for no standby.
SELECT set_config('statement_timeout', %(timeout)s, false), set_config('lock_timeout', '5s', false),
       set_config('synchronous_commit', 'local', false);
