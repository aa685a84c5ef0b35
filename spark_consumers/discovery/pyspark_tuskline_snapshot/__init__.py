"""What makes Spark find `format("tuskline-snapshot")` in a plain session, without registering it.

Spark lists `sys.path` for modules named `pyspark_*` and takes the class `DefaultSource` from each.
"""

from spark_consumers.sources.snapshot import SnapshotSource


class DefaultSource(SnapshotSource):
    """`format("tuskline-snapshot")`."""
