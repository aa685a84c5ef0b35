"""What a Spark session needs so that a lake is read and written correctly, whatever else a user has set.

A session that lacks it is refused with an error that names the setting or the jar, and `tuskline doctor` reports the same.
"""

import re
from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from spark_consumers.spark import jars
from spark_consumers.spark.defaults import DELTA, ICEBERG
from walsender_bridge.errors import NotSupportedError

_CLASSES = {
    ICEBERG: "org.apache.iceberg.spark.SparkCatalog",
    DELTA: "org.apache.spark.sql.delta.catalog.DeltaCatalog",
}
#: Which file system Hadoop has for local files, and the one that compares checksums.
_FILES, _CHECKED = "spark.hadoop.fs.file.impl", "org.apache.hadoop.fs.LocalFileSystem"

#: The first version of Iceberg that compares a column's initial default with a filter, in files that lack the column (its issue 16690).
_LEAST = (1, 12)

#: The JVMs that have it: what is on a class path stays there, and to ask takes as long as to open a table.
_with_iceberg: "WeakSet[Any]" = WeakSet()


def unmet(settings: Mapping[str, str]) -> NotSupportedError | None:
    """The error for a setting with which a lake is not read correctly; None if there is none."""
    files = settings.get(_FILES, _CHECKED)
    if files != _CHECKED:
        return NotSupportedError(
            f"the Spark setting {_FILES} is {files}, which does not verify the checksums of a lake's data files",
            repair=f"remove the setting {_FILES}",
        )
    return None


def check(spark: Any) -> None:
    """Raise `NotSupportedError` for a session with which a lake is not read correctly.

    The JVM of a session of Spark Connect is out of sight: there, a missing Iceberg shows when a table is opened.
    """
    found = spark.conf.get(_FILES, None)
    check_settings({} if found is None else {_FILES: found})
    jvm = getattr(spark, "_jvm", None)
    if jvm is not None:
        check_iceberg(jvm)


def has_jvm(spark: Any) -> bool:
    """Whether the session has a JVM of its own: one of Spark Connect has none."""
    return getattr(spark, "_jvm", None) is not None


def check_driver(spark: Any) -> None:
    """Raise `NotSupportedError` for a session of Spark Connect, in which no lake is written."""
    if not has_jvm(spark):
        raise NotSupportedError(
            "a session of Spark Connect cannot write a lake",
            repair="start the lake's driver by spark-submit, or with `tuskline lake run`",
        )


def check_settings(settings: Mapping[str, str]) -> None:
    """Raise `NotSupportedError` for a setting with which a lake is not read correctly."""
    if (error := unmet(settings)) is not None:
        raise error


def check_iceberg(jvm: Any) -> None:
    """Raise `NotSupportedError` unless the JVM has Iceberg for its own version of Spark, and a version that reads a lake correctly."""
    if jvm in _with_iceberg:
        return
    place = _place(jvm, _CLASSES[ICEBERG])
    if place is None:
        kept = ",".join(str(jar) for jar in jars.kept())
        flag = f"--jars {kept}" if kept else f"--packages {jars.ICEBERG}"
        raise NotSupportedError(
            "Spark's JVM was started without Iceberg's jars",
            repair=f"start it with them: spark-submit {flag}, or the setting spark.jars or spark.jars.packages",
        )
    spark = str(jvm.org.apache.spark.package.SPARK_VERSION())
    if (error := other_runtime(place, spark)) is not None:
        raise error
    _with_iceberg.add(jvm)


def other_runtime(place: str, spark: str) -> NotSupportedError | None:
    """The error for an Iceberg runtime, at this place, that is built for another version of Spark than `spark`, or is too old."""
    built = re.search(rf"{ICEBERG}-(\d+\.\d+)_[\d.]+(?:-(\d+)\.(\d+))?", place)
    if built is None:
        return None
    where, minor = place.partition("!")[0], ".".join(spark.split(".")[:2])
    if built[1] != minor:
        return NotSupportedError(
            f"Spark {spark} has Iceberg's jar for Spark {built[1]}",
            where=where,
            repair=f"use {ICEBERG}-{minor}_2.13 instead",
        )
    if built[2] is not None and (int(built[2]), int(built[3])) < _LEAST:
        return NotSupportedError(
            f"Iceberg {built[2]}.{built[3]} omits rows that are older than a column with a default from a query that filters by the column",
            where=where,
            repair=f"use {jars.ICEBERG} instead",
        )
    return None


def formats_in(jvm: Any) -> set[str]:
    """The table formats on the JVM's class path."""
    return {format_ for format_, name in _CLASSES.items() if _place(jvm, name) is not None}


def _place(jvm: Any, name: str) -> str | None:
    """Where a class comes from; None if it is not on the class path."""
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    found = loader.getResource(f"{name.replace('.', '/')}.class")
    return None if found is None else str(found.toString())
