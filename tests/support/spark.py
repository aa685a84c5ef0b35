"""Spark for tests: one session in a worker, with a lake of its own as the catalog `tuskline`."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.s3 import KEYS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator["SparkSession"]:
    """The worker's session. A test that wants a lake of its own asks `session(lake=..., catalog=...)`."""
    from spark_consumers.spark import jars
    from spark_consumers.spark.scratch import scratch, settings
    from spark_consumers.spark.session import session

    with (
        tempfile.TemporaryDirectory(prefix="tuskline-spark-") as folder,
        scratch(Path(folder) / "scratch") as place,
    ):
        # The JVM has the keys of the tests' bucket, and what it needs to use them.
        with pytest.MonkeyPatch.context() as environment:
            for name, value in KEYS.items():
                environment.setenv(name, value)
            running = session(
                "tuskline tests",
                lake=f"{folder}/lake",
                conf={
                    **settings(place),
                    "spark.jars": ",".join(str(jar) for jar in jars.paths(wanted=jars.S3)),
                    "spark.driver.memory": os.environ.get("TUSKLINE_TEST_SPARK_MEMORY", "1g"),
                    "spark.log.level": "ERROR",
                    "spark.sql.warehouse.dir": f"{folder}/warehouse",
                },
            )
        yield running
        running.stop()
