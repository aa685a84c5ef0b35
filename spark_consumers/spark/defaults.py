"""What `session` sets where a user has not: settings of the lake, and those of a session on one machine.

A user's setting wins over each of them. Two are lists, to which ours are added: a lake needs Iceberg's jar and extension
whatever else is used.
"""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from walsender_bridge.errors import UsageError

MASTER: Final = "local[2]"
ICEBERG, DELTA = "iceberg-spark-runtime", "delta-spark"
#: The daemon of this package, which executors on other machines may not have.
DAEMON: Final = "spark_consumers.spark.daemon"
_EXTENSIONS: Final = {
    ICEBERG: "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions",
    DELTA: "io.delta.sql.DeltaSparkSessionExtension",
}
#: Settings that are lists, separated by commas.
_LISTS: Final = ("spark.jars", "spark.sql.extensions")
#: Where a user may bring jars.
_JARS: Final = ("spark.jars", "spark.jars.packages", "spark.driver.extraClassPath")


def is_local(master: str) -> bool:
    """Whether executors run on this machine, from the Python and the files of the driver."""
    return master.partition("[")[0] in {"local", "local-cluster"}


def of_lake(lake: str | Path, catalog: str) -> dict[str, str]:
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


def of_any_session(formats: Iterable[str], python: str) -> dict[str, str]:
    """The settings of every session that has these table formats on its class path; `python`: the workers' Python."""
    found = [format_ for format_ in (ICEBERG, DELTA) if format_ in set(formats)]
    common = {
        "spark.pyspark.driver.python": sys.executable,
        "spark.pyspark.python": python,
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.extensions": ",".join(_EXTENSIONS[format_] for format_ in found),
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
    }
    if DELTA in found:
        common["spark.sql.catalog.spark_catalog"] = (
            "org.apache.spark.sql.delta.catalog.DeltaCatalog"
        )
    return common


def of_one_machine() -> dict[str, str]:
    """The settings of a session whose driver and executors are on this machine, and which is not shared."""
    return {
        # Delta's own default is 50 tasks for each look at a table's log.
        "spark.databricks.delta.snapshotPartitions": "2",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "1g",
        "spark.python.daemon.module": DAEMON,
        "spark.sql.shuffle.partitions": "2",
        "spark.ui.enabled": "false",
    }


def brought(settings: Mapping[str, str], jars: Iterable[str]) -> set[str]:
    """The table formats that these settings, or jars of Spark's own folder, bring."""
    named = [settings.get(key, "") for key in _JARS] + list(jars)
    return {format_ for format_ in (ICEBERG, DELTA) if any(format_ in each for each in named)}


def added_jars(ours: Iterable[Path], formats: set[str]) -> list[Path]:
    """Those of our jars that a session needs which has these table formats already: Delta's are not needed for a lake."""
    if ICEBERG in formats:
        return []
    return [jar for jar in ours if DELTA not in formats or ICEBERG in jar.name]


def merged(
    ours: Mapping[str, str], theirs: Mapping[str, str], asked: Mapping[str, str]
) -> dict[str, str]:
    """The settings of a session: `asked` by the program, or given to Spark by the user, or else ours."""
    found = {**ours, **theirs, **asked}
    for key in _LISTS:
        parts = [*(asked.get(key) or theirs.get(key, "")).split(","), *ours.get(key, "").split(",")]
        found[key] = ",".join(dict.fromkeys(filter(None, map(str.strip, parts))))
    return {key: value for key, value in found.items() if value or key not in _LISTS}


def check_catalog(wanted: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Raise `UsageError` if the user's settings make another lake of the catalog than is asked for."""
    for key, value in wanted.items():
        now = found.get(key, value)
        # To keep what a catalog has read is the user's choice, and so is whose secret it is.
        if now != value and not key.endswith((".cache-enabled", ".token", ".credential")):
            raise UsageError(
                f"Spark's settings have {key} = {now}, not {value}",
                repair="remove this setting, or specify another catalog for this lake",
            )
