"""Names the jobs of a lake's driver, for Spark's UI and its event log."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark import SparkContext

#: Tables that a description names; of more it names fewer, and says how many others there are.
_NAMED: Final = 3
_PROPERTIES: Final = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")


def description(subject: str, lake: str, tables: Collection[str], what: str) -> str:
    """What a job does: `tuskline: epoch 123 of lake shop: shop.public.orders, fold and write`."""
    names = sorted(tables)
    if len(names) > _NAMED:
        names = [*names[: _NAMED - 1], f"and {len(names) - _NAMED + 1} other tables"]
    return f"tuskline: {subject} of lake {lake}: {', '.join([*names, what])}"


@contextmanager
def described(context: "SparkContext", group: str, text: str) -> Iterator[None]:
    """Jobs that this thread starts within the block are of this job group, and have this description."""
    before = {name: context.getLocalProperty(name) for name in _PROPERTIES}
    context.setJobGroup(group, text)
    try:
        yield
    finally:
        for name, value in before.items():
            context.setLocalProperty(name, value)  # type: ignore[arg-type]  # None removes it
