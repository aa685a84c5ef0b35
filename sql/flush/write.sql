-- A committed change that capture is sure to see, also when the database is idle.
UPDATE tuskline.flush SET token = token + 1, at = clock_timestamp() WHERE id = 1;
