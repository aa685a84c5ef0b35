-- Whether `init` has made the functions with which SQL sessions wait for the lake, or replaced those of an earlier version.
SELECT EXISTS (SELECT FROM pg_proc AS p JOIN pg_namespace AS n ON n.oid = p.pronamespace
               WHERE n.nspname = 'tuskline' AND p.proname = 'request_channel');
