"""What makes Spark find `format("tuskline")` in a plain session, without registering it.

Spark lists `sys.path` for modules named `pyspark_*` and takes the class `DefaultSource` from each.
"""

from spark_consumers.sources.changes import TusklineSource


class DefaultSource(TusklineSource):
    """`format("tuskline")`."""
