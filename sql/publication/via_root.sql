-- A partitioned table arrives as one table, not as its partitions (13 and later).
ALTER PUBLICATION {publication} SET (publish_via_partition_root = true);
