"""The files of a table: Iceberg, their checksums, and what removes them."""
