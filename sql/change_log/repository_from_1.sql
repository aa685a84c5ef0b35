-- What format 2 of the repository's file adds: checksums.
ALTER TABLE record ADD COLUMN crc INTEGER;
ALTER TABLE checkpoint ADD COLUMN crc INTEGER;
ALTER TABLE commits ADD COLUMN crc INTEGER;
