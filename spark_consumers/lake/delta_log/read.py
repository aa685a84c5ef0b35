"""A table of an epoch, read by Delta: the version of its log that shows the epoch's snapshot."""

import time
from typing import TYPE_CHECKING, Any, Final

from spark_consumers.lake.delta_log.log import DeltaLog, refusal_of
from spark_consumers.lake.store.place import place
from spark_consumers.spark.failures import SPARK_ERRORS, line_of
from spark_consumers.spark.jars import DELTA
from walsender_bridge.errors import LakeError, NotSupportedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Seconds that a reader waits for the commit of an epoch, which is made right behind its link.
_PATIENCE = 10.0
_POLL_SECONDS: Final = 0.05
_NO_DELTA: Final = "DATA_SOURCE_NOT_FOUND"


def read_version(spark: "SparkSession", path: str, order: tuple[int, int], snapshot: int) -> Any:
    """The table in folder `path` at a snapshot that the link of this order (`Shown.order`) names, as a Spark DataFrame that Delta reads.

    Raises `LakeError` if its Delta log does not show the snapshot, `CorruptError` for a damaged commit, `NotSupportedError` for a
    table that cannot be a Delta table, or a session without Delta.
    """
    version = version_of(path, order, snapshot)
    try:
        frame = spark.read.format("delta").option("versionAsOf", version).load(path)
        _ = frame.schema
        return frame
    except SPARK_ERRORS as error:
        if _NO_DELTA in str(error):
            raise NotSupportedError(
                "this Spark session has no Delta",
                where=path,
                repair=f"start Spark, or the Spark Connect server, with spark.jars.packages={DELTA} and Delta's extension and catalog",
            ) from error
        raise LakeError(
            f"Delta cannot open the table: {line_of(error)}",
            where=path,
            repair="read the table by Iceberg, and find the damaged file: tuskline lake verify",
        ) from error


def version_of(
    path: str, order: tuple[int, int], snapshot: int, patience: float | None = None
) -> int:
    """The version of the table's log that shows this snapshot, of the link or an earlier one; waits for it. Raises `LakeError`.

    `patience`: seconds to wait; by default ten.
    """
    table = place(path)
    log = DeltaLog(table)
    deadline = time.monotonic() + (_PATIENCE if patience is None else patience)
    while True:
        commits = log.listing().commits
        found, newest = _last_until(log, commits, order)
        if found is not None and found[1] == snapshot:
            return found[0]
        refused = refusal_of(table)
        if newest >= order or time.monotonic() > deadline:
            break
        if refused is not None and refused[0] == snapshot:
            break
        time.sleep(_POLL_SECONDS)
    # The last snapshot that was refused may be a later one than this.
    if newest < order and refused is not None:
        raise NotSupportedError(
            refused[1],
            where=path,
            repair="read the table by Iceberg; docs/delta.md has the remedies",
        )
    if not commits:
        raise LakeError(
            "the table has no Delta log",
            where=path,
            repair="set delta = true in [lake] or [[lake.tables]], and check the log of `tuskline lake run` for the reason if the table cannot have one",
        )
    raise LakeError(
        f"the table's Delta log does not show snapshot {snapshot}",
        where=path,
        repair="read a later epoch, or read the table by Iceberg; if the log is behind, check that `tuskline lake run` is running",
    )


def _last_until(
    log: DeltaLog, commits: tuple[int, ...], order: tuple[int, int]
) -> tuple[tuple[int, int] | None, tuple[int, int]]:
    """The last version that shows no newer a link than this, with its snapshot; and the order of what the newest version shows.

    The links of a log ascend with its versions, so it is found by bisection.
    """
    if not commits:
        return None, (-1, -1)
    newest = log.shown(commits[-1])
    if newest.order <= order:
        return (commits[-1], newest.snapshot), newest.order
    low, high = 0, len(commits) - 1
    while low < high:
        middle = (low + high) // 2
        if log.shown(commits[middle]).order <= order:
            low = middle + 1
        else:
            high = middle
    if not low:
        return None, newest.order
    at = commits[low - 1]
    return (at, log.shown(at).snapshot), newest.order
