"""The Spark session in which a command reads and writes the lake of `[lake]`, as its settings say."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from walsender_bridge.cli.options import lake_section

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from walsender_bridge.config import Config


@contextmanager
def lake_session(settings: "Config", name: str) -> "Iterator[SparkSession]":
    """A session with this name for the block, with scratch folders of its own. Raises the errors of `session`."""
    from py4j.protocol import Py4JError

    from spark_consumers.spark.scratch import scratch
    from spark_consumers.spark.scratch import settings as scratch_settings
    from spark_consumers.spark.session import master_of, session, submitted

    lake = lake_section(settings)
    with scratch(settings.scratch_dir) as own_folder:
        # Under spark-submit the JVM already runs, with the folders of its own settings.
        own = {} if submitted() else scratch_settings(own_folder, master_of(lake.spark_master))
        spark = session(
            name,
            lake.spark_master,
            lake=lake.uri,
            default_conf=own,
            endpoint=lake.endpoint,
            region=lake.region,
        )
        try:
            yield spark
        finally:
            with contextlib.suppress(Py4JError, OSError):  # its JVM may have ended
                spark.stop()
