-- Which transactions this snapshot sees.
SELECT txid_current_snapshot()::text;
