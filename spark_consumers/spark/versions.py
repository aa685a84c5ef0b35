"""Which versions of Spark, Java and the table formats' jars work together.

Found by running them (docs/decisions/environment.md). Iceberg's and Delta's jars are built for one minor
version of Spark, and `jars` names those for 4.1: on another they fail inside, with linkage errors.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Final

from spark_consumers.spark import jars, java
from walsender_bridge.errors import NotSupportedError

#: Minor versions of PySpark that were tried, and what works there with the newest jars that exist for it.
TRIED: Final = {
    # 4.1.4, and the oldest, 4.1.0.
    "4.1": ("Iceberg", "Delta"),
    "4.2": ("Delta",),
    "4.3": (),
}
WANTED: Final = "4.1"


@dataclass(frozen=True, slots=True)
class VersionProblem:
    """A combination that does not work; `fatal` if no lake can be written with it."""

    what: str
    repair: str
    fatal: bool = True


def problems(
    pyspark: str | None, delta_spark: str | None, java_problem: str | None
) -> list[VersionProblem]:
    """Evaluate these versions; None: not installed (for Java: no problem)."""
    return [*_spark(pyspark), *_delta(delta_spark), *_java(java_problem)]


def _spark(version: str | None) -> Iterator[VersionProblem]:
    repair = "pip install 'pyspark>=4.1,<4.2'"
    if version is None:
        yield VersionProblem("PySpark is not installed", "pip install 'tuskline[spark]'")
        return
    minor = ".".join(version.split(".")[:2])
    if minor == WANTED:
        return
    if minor in TRIED:
        works = " and ".join(TRIED[minor]) or "neither Iceberg nor Delta"
        yield VersionProblem(
            f"PySpark {version}: {works} works with it, but the lake needs Iceberg", repair
        )
    else:
        yield VersionProblem(
            f"PySpark {version}: Iceberg's and Delta's jars are for {WANTED}", repair
        )


def _delta(version: str | None) -> Iterator[VersionProblem]:
    if version is not None:
        yield VersionProblem(
            f"the package delta-spark {version} is installed: it adds a jar that it chooses itself, and "
            "4.4.1 names one that does not exist",
            "pip uninstall delta-spark; the matching jars are named by coordinates",
            fatal=False,
        )


def _java(problem: str | None) -> Iterator[VersionProblem]:
    if problem is not None:
        yield VersionProblem(
            problem, "install a Java of 17 to 22, or: pip install 'tuskline[local]'"
        )


def combination() -> str:
    """The combination of this machine, for a person."""
    iceberg = jars.ICEBERG.rpartition(":")[2]
    return f"PySpark {_installed('pyspark')}, Iceberg {iceberg} for Spark {WANTED}, Java {java.find().major}"


def here() -> list[VersionProblem]:
    """Evaluate the versions that are installed on this machine."""
    try:
        java.find()
    except NotSupportedError as error:
        java_problem: str | None = error.what
    else:
        java_problem = None
    return problems(_installed("pyspark"), _installed("delta-spark"), java_problem)


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
