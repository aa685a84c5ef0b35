-- What is committed by now, the timeline, and the end of the write-ahead log. A transaction that is visible in the snapshot has
-- written its commit record before a position that is read later.
SELECT txid_current_snapshot()::text, tuskline.timeline();
