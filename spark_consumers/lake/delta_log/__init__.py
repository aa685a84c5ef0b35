"""The tables of a lake as Delta tables: a Delta log in each table's folder, over the data files of its Iceberg snapshots."""
