"""A Spark session that can read and write a lake: Java, jars, catalog and time zone set up.

Tuskline's sources are found in any PySpark 4.1 session without this. It is for those who have no session
yet: the pipeline, the demo, the tests, a notebook on a laptop. Under spark-submit the JVM is there already, and
what its flags and `spark-defaults.conf` say goes before what is chosen here.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from spark_consumers.spark import jars, java
from walsender_bridge.errors import NotSupportedError, UsageError

CATALOG = "tuskline"
#: What spark-submit gives a Python program: where the JVM that it has started listens.
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
_ICEBERG = "org.apache.iceberg.spark.SparkCatalog"
_EXTENSIONS = (
    "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    "io.delta.sql.DeltaSparkSessionExtension",
)


def catalog_settings(lake: str | Path, catalog: str = CATALOG) -> dict[str, str]:
    """The settings that make `catalog` the lake's tables: an Iceberg catalog in the folder `<lake>/tables`.

    Without `cache-enabled=false` a session goes on seeing the snapshots that it saw first.
    """
    name = f"spark.sql.catalog.{catalog}"
    return {
        name: "org.apache.iceberg.spark.SparkCatalog",
        f"{name}.type": "hadoop",
        f"{name}.warehouse": f"{str(lake).rstrip('/')}/tables",
        f"{name}.cache-enabled": "false",
    }


def settings(
    *,
    lake: str | Path | None = None,
    catalog: str = CATALOG,
    progress: jars.Progress = jars.print_progress,
) -> dict[str, str]:
    """Everything `session` sets beyond name and master, for those who build their own session."""
    own_jvm = {
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.jars": ",".join(str(jar) for jar in jars.paths(progress)),
    }
    return own_jvm | _in_any_jvm(lake, catalog)


def _in_any_jvm(lake: str | Path | None, catalog: str) -> dict[str, str]:
    common = {
        "spark.pyspark.driver.python": sys.executable,
        "spark.pyspark.python": sys.executable,
        "spark.python.daemon.module": "spark_consumers.spark.daemon",
        "spark.python.worker.reuse": "true",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.extensions": ",".join(_EXTENSIONS),
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
    }
    return common | (catalog_settings(lake, catalog) if lake is not None else {})


def session(
    app_name: str = "tuskline",
    master: str = "local[2]",
    *,
    lake: str | Path | None = None,
    catalog: str = CATALOG,
    conf: Mapping[str, str] | None = None,
    progress: jars.Progress = jars.print_progress,
) -> SparkSession:
    """The process's Spark session, started if there is none.

    `lake` names the lake's root folder or URI and makes its tables the catalog `catalog`; on a session that
    runs already the catalog is added to it, so several lakes can be read at once under different names.
    `conf` overrides any setting; on a running session only what Spark can change then. Driver memory and
    jars are set when the JVM starts. Under spark-submit its own master, name and settings are kept; only what
    is in `conf` overrides them. Raises `NotSupportedError` without a Java, or without the jars under spark-submit,
    `UnavailableError` when they cannot be fetched, `UsageError` for a catalog name that a running session uses for
    another lake.
    """
    if SparkContext._active_spark_context is not None:  # noqa: SLF001  # a session is active in its thread only
        running = SparkSession.builder.getOrCreate()
        wanted = catalog_settings(lake, catalog) if lake is not None else {}
        for key, value in (wanted | dict(conf or {})).items():
            _set(running, key, value, fixed=key in wanted)
        return running
    if submitted():
        return _in_submitted(lake, catalog, conf or {}, progress)
    os.environ["JAVA_HOME"] = str(java.find().home)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # The JVM that only makes up the other one's command line keeps no counters in /tmp.
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:-UsePerfData")
    builder = SparkSession.builder.appName(app_name).master(master)
    for key, value in (
        settings(lake=lake, catalog=catalog, progress=progress) | dict(conf or {})
    ).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def is_alive(spark: SparkSession) -> bool:
    """Whether the session's JVM is there."""
    try:
        return not spark._jsc.sc().isStopped()  # noqa: SLF001  # no public way
    except Exception:
        return False


def submitted() -> bool:
    """Whether spark-submit runs this program: the JVM is its, and the session begins in it."""
    return _SUBMITTED in os.environ


def _in_submitted(
    lake: str | Path | None, catalog: str, conf: Mapping[str, str], progress: jars.Progress
) -> SparkSession:
    # With the JVM known, the configuration is what spark-submit has made of its flags and files.
    SparkContext._ensure_initialized()  # noqa: SLF001  # PySpark's own way to a JVM that runs
    submitted = dict(SparkConf().getAll())
    _check_iceberg(SparkContext._jvm, progress)  # noqa: SLF001  # as above
    ours = _in_any_jvm(lake, catalog)
    extensions = [submitted.get("spark.sql.extensions", ""), ours["spark.sql.extensions"]]
    both = {"spark.sql.extensions": ",".join(filter(None, extensions))}
    builder = SparkSession.builder
    for key, value in (ours | submitted | both | dict(conf)).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _check_iceberg(jvm: Any, progress: jars.Progress) -> None:
    """See that the JVM has Iceberg: once it runs, nothing can be added to its class path."""
    try:
        jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(_ICEBERG)
    except Py4JError:
        needed = ",".join(str(jar) for jar in jars.paths(progress))
        raise NotSupportedError(
            "spark-submit was started without Iceberg's jars",
            repair=f"spark-submit --jars {needed}",
        ) from None


def _set(running: SparkSession, key: str, value: str, *, fixed: bool) -> None:
    """Set it, unless it is so already; a `fixed` one may not be something else already."""
    now = running.conf.get(key, None)
    if now == value:
        return
    if fixed and now is not None:
        raise UsageError(
            f"this Spark session has {key} = {now}, not {value}",
            repair="specify another catalog for the second lake, or stop the session first",
        )
    running.conf.set(key, value)
