"""What the executors of a session have, found by running a small task on them.

An executor needs this package, at the driver's version, and what it depends on; and it needs the lake under the driver's path.
What is missing on one of several executors shows as a task that fails now and then: so a driver looks before it begins.
"""

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from spark_consumers.spark import buckets, defaults
from spark_consumers.spark.failures import SPARK_ERRORS
from spark_consumers.spark.job_group import described
from walsender_bridge.errors import NotSupportedError, UnavailableError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: What executors import, by the names of the distributions.
_PACKAGES: Final = ("tuskline", "pyarrow", "numpy", "pyroaring", "adbc-driver-postgresql")
#: And for a lake in a bucket.
_OF_BUCKET: Final = "obstore"
#: Tasks for each core, each of which waits a moment: so every executor gets some.
_TASKS_PER_CORE, _PAUSE = 2, 0.1
_DAEMON: Final = "spark.python.daemon.module"
_GROUP: Final = "tuskline executors"
#: Seconds within which an executor has to be there.
_PATIENCE: Final = 120.0


@dataclass(frozen=True, slots=True)
class Found:
    """What one executor has. `packages`: versions by distribution, None where it is missing; `lake`: its identity there."""

    host: str
    python: str
    packages: tuple[tuple[str, str | None], ...]
    lake: str | None


def here(lake: object = None) -> Found:
    """What this process has, for the lake at this path or `s3://` location."""
    return Found(*_looker()(_packages(lake), _place(lake)))


def look(spark: "SparkSession", lake: object = None) -> list[Found]:
    """What the executors have, each once.

    Raises `NotSupportedError` if they cannot run a task of Python, `UnavailableError` if there is none within a minute or two.
    """
    context = spark.sparkContext
    packages, place, pause, look_there = _packages(lake), _place(lake), _PAUSE, _looker()
    tasks = _TASKS_PER_CORE * context.defaultParallelism

    def task(_: int) -> Any:
        time.sleep(pause)
        return look_there(packages, place)

    is_late = threading.Event()

    def give_up() -> None:
        is_late.set()
        context.cancelJobGroup(_GROUP)

    timer = threading.Timer(_PATIENCE, give_up)
    timer.start()
    try:
        with described(context, _GROUP, "tuskline: what the executors have"):
            found = context.parallelize(range(tasks), tasks).map(task).collect()
    except SPARK_ERRORS as error:
        if is_late.is_set():
            raise UnavailableError(
                f"no executor has run a task within {_PATIENCE:.0f} s",
                where=str(context.master),
                repair="check in Spark's UI that the cluster has free cores and memory for this application",
            ) from error
        raise cannot_run(str(error), spark.conf.get(_DAEMON, "") or "") from error
    finally:
        timer.cancel()
    return [Found(*each) for each in dict.fromkeys(found)]


def _packages(lake: object) -> tuple[str, ...]:
    return (*_PACKAGES, _OF_BUCKET) if buckets.is_bucket(lake) else _PACKAGES


def _place(lake: object) -> str | None:
    """Where executors look for the lake: in a bucket, all see the same."""
    return None if lake is None or buckets.is_bucket(lake) else str(lake)


def _looker() -> Callable[[tuple[str, ...], str | None], tuple[Any, ...]]:
    """The function that looks. It is sent as it is, for an executor may lack this module; so it imports all that it needs."""

    def look(packages: tuple[str, ...], lake: str | None) -> tuple[Any, ...]:
        import hashlib
        import platform
        import socket
        from importlib import metadata
        from pathlib import Path

        versions: list[tuple[str, str | None]] = []
        for name in packages:
            try:
                versions.append((name, metadata.version(name)))
            except metadata.PackageNotFoundError:
                versions.append((name, None))
        identity = None
        if lake is not None and Path(lake).is_dir():
            record = Path(lake, "_tuskline", "lake.json")
            content = record.read_bytes() if record.is_file() else b""
            identity = hashlib.sha256(content).hexdigest()
        return socket.gethostname(), platform.python_version(), tuple(versions), identity

    return look


def are_like_driver(master: str, python: str) -> bool:
    """Whether executors have what the driver has, since they are on its machine with its Python."""
    return defaults.is_local(master) and python == sys.executable


def check(spark: "SparkSession", lake: object = None) -> None:
    """Raise `NotSupportedError` for the first thing that an executor lacks."""
    context = spark.sparkContext
    if are_like_driver(str(context.master), context.pythonExec):
        return
    for error in lacking(here(lake), look(spark, lake)):
        raise error


def lacking(driver: Found, executors: Iterable[Found]) -> Iterator[NotSupportedError]:
    """The errors for what executors lack of what the driver has."""
    wanted = dict(driver.packages)
    for executor in executors:
        where = f"executor on {executor.host}"
        minor = executor.python.rpartition(".")[0]
        if minor != driver.python.rpartition(".")[0]:
            yield NotSupportedError(
                f"it has Python {executor.python}, and the driver Python {driver.python}",
                where=where,
                repair="set spark.pyspark.python to the same minor version of Python on each machine",
            )
        for name, version in executor.packages:
            if wanted[name] is None:
                continue  # a driver that runs from a source tree
            if version is None:
                yield NotSupportedError(
                    f"the package {name} is not installed",
                    where=where,
                    repair=f"pip install 'tuskline{'[s3]' if name == _OF_BUCKET else ''}=={wanted['tuskline']}'"
                    " for the Python of spark.pyspark.python",
                )
            elif name == "tuskline" and version != wanted[name]:
                yield NotSupportedError(
                    f"it has tuskline {version}, and the driver {wanted[name]}",
                    where=where,
                    repair=f"pip install 'tuskline=={wanted[name]}' there",
                )
        if executor.lake != driver.lake:
            yield NotSupportedError(
                "the lake's folder is not there, or is another lake's",
                where=where,
                repair="mount the lake at the driver's path on each machine with executors",
            )


def cannot_run(error: str, daemon: str) -> NotSupportedError:
    """The error for executors whose tasks failed with that text, while `daemon` is the setting of Python's daemon module."""
    if daemon and re.search(
        rf"No module named '?{re.escape(daemon.partition('.')[0])}|Error while finding module",
        error,
    ):
        return NotSupportedError(
            f"executors cannot start Python: they lack {daemon}, which spark.python.daemon.module names",
            repair="install the package for their Python, or remove spark.python.daemon.module",
        )
    lines = [line.strip() for line in error.splitlines()]
    told = [line for line in lines if re.match(r"(Caused by: )?[\w.]*(Error|Exception): .", line)]
    return NotSupportedError(
        f"executors cannot run a task of Python: {(told or lines or ['no reason'])[-1][:300]}",
        repair="check spark.pyspark.python, and the executors' logs",
    )
