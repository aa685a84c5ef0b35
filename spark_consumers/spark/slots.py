"""How many tasks a session can run at once, also those of executors that are not there yet."""

from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from pyspark import SparkContext

#: What a context says of its executors. It has the same settings for as long as it lives, and to ask it copies all of them.
_SETTINGS: "Final[WeakKeyDictionary[SparkContext, dict[str, Any]]]" = WeakKeyDictionary()
#: With dynamic allocation and no limit of the user's: far more than the driver has to hand out at once.
_UNLIMITED: Final = 64


def slots(context: "SparkContext") -> int:
    """The tasks that the session runs at once; with dynamic allocation, once it has all executors that it may have."""
    if context not in _SETTINGS:
        conf = context.getConf()
        _SETTINGS[context] = {
            "is_dynamic": conf.get("spark.dynamicAllocation.enabled", "false") == "true",
            "most": conf.get("spark.dynamicAllocation.maxExecutors"),
            "cores": int(conf.get("spark.executor.cores", "1")),
            "cpus": int(conf.get("spark.task.cpus", "1")),
        }
    return expected(context.defaultParallelism, **_SETTINGS[context])


def expected(now: int, *, is_dynamic: bool, most: str | None, cores: int, cpus: int) -> int:
    """The slots of a session that has `now`: it asks for executors only while there are tasks that wait for one.

    `most`: executors at most, None without a limit. `cores` of an executor, `cpus` of them for a task.
    """
    if not is_dynamic:
        return now
    limit = int(most) if most is not None and most.isdecimal() else _UNLIMITED
    return max(now, min(limit * max(1, cores // cpus), _UNLIMITED))


def in_partitions(count: int, at_once: int, each: int) -> int:
    """In how many of Spark's tasks `count` tasks of ours are run, which are mostly smaller: as many as run `at_once`.

    More if one had more than `each`: a task that fails is run again as a whole, and an executor that comes later takes whole tasks.
    """
    return min(count, max(at_once, -(-count // each)))
