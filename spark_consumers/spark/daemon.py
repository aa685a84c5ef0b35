"""The program that forks Spark's Python workers: PySpark's own daemon, with a short path and with Arrow loaded.

Spark puts its own archives on each worker's path (`pyspark.zip`, py4j's, and a jar of 5,000 entries), before the
package that is installed, and every task begins with `importlib.invalidate_caches()`, which up to Python 3.11 reads
the directories of all of them again: 50 ms of processor time a task. Modules that come from an archive are compiled
each time as well. The same modules are in the package, compiled once. What the sources need is imported here, before
the fork, instead of in each worker, and is not examined by the garbage collection that PySpark makes after each task
(over 10 ms a task, and a copy of all of it in each worker).

`spark_consumers.spark.session.settings` names this module as `spark.python.daemon.module`; another session can too.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from pathlib import Path


def without_archives(path: Sequence[str]) -> list[str]:
    """`path` without what lies inside the PySpark package that is found on it.

    Where PySpark is not installed as a package, or the archives are those of another one, they stay: the driver
    decides which PySpark runs.
    """
    folders = [place for place in path if not Path(place).is_file()]
    found = PathFinder.find_spec("pyspark", folders)
    if found is None or not found.submodule_search_locations:
        return list(path)
    package = Path(found.submodule_search_locations[0]).resolve()
    return [place for place in path if not Path(place).resolve().is_relative_to(package)]


def main() -> None:
    """Serve until Spark closes standard input."""
    sys.path[:] = without_archives(sys.path)
    # What is remembered of the archives would be read again all the same.
    sys.path_importer_cache.clear()
    gc.disable()
    from pyspark.daemon import manager

    import spark_consumers.sources.changes  # noqa: F401  # so each worker has it from its first task on

    gc.freeze()
    gc.enable()
    serve: Callable[[], None] = manager  # PySpark gives it no types.
    serve()


if __name__ == "__main__":
    main()
