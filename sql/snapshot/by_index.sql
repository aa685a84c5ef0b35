-- For a range of a key: a sequential scan would read the whole relation for a part of it.
SET LOCAL enable_seqscan = off;
