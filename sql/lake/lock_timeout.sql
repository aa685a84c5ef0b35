-- The catalog is locked for moments only; of the tables, only the size of a new partition is asked.
SET lock_timeout = '3s';
