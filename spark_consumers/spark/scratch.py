"""A folder for what a Spark driver and its JVM make for themselves, removed whatever ends them.

A JVM that is killed leaves its shuffle files and the native libraries that it unpacked; in the system's
temporary folder nobody would ever remove them, and a job that is started again and again would fill it.

Each driver has a folder of its own below a common one, and holds the kernel's lock (`flock`) on a file in it for
as long as it lives. So a folder whose lock is free is a dead driver's: the next one removes it.
"""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from walsender_bridge.runtime import cache

_LOCK = "lock"


@contextmanager
def scratch(root: Path) -> Iterator[Path]:
    """A new folder below `root` for as long as the block lasts; those of the dead are removed first."""
    with cache.exclusive(root):
        # Nobody is between making its folder and locking it now.
        root.mkdir(parents=True, exist_ok=True)
        for left in filter(_is_left, root.iterdir()):
            shutil.rmtree(left, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix="driver-", dir=root))
        lock = (folder / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        with lock:
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_left(folder: Path) -> bool:
    try:
        with (folder / _LOCK).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        # Its driver was killed before it made the lock, or while it removed the folder.
        return folder.name.startswith("driver-")
    except NotADirectoryError:
        return False
    return True


def settings(folder: Path, master: str = "local") -> dict[str, str]:
    """The Spark settings that put a driver's files into `folder`, for a session that is not started yet.

    Executors of a cluster run on other machines, which know no such folder: theirs is the cluster's business.
    `SPARK_LOCAL_DIRS` goes before it, as ever, and the JVM's own options stay free for the user.
    """
    # A JVM keeps its counters in /tmp, whatever java.io.tmpdir is.
    jvm = {"spark.driver.defaultJavaOptions": f'-XX:-UsePerfData -Djava.io.tmpdir="{folder}"'}
    if master.partition("[")[0] != "local":
        return jvm
    return {**jvm, "spark.local.dir": str(folder)}
