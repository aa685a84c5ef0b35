-- Which transactions this snapshot sees; and the time, in microseconds since the Unix epoch.
SELECT txid_current_snapshot()::text, (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
