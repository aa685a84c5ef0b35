"""The folds of an epoch's ranges, divided and composed by several tasks, one after the other and without Spark."""

from collections.abc import Sequence

from spark_consumers.fold.keyed import Fold
from spark_consumers.fold.multiset import MultisetFold
from spark_consumers.lake.epoch import divided
from spark_consumers.lake.epoch.stage import Staged, composing_of, run_compose
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.data_files import write_partial, write_partials


def composed_in_parts(
    target: Target, folds: Sequence[Fold | MultisetFold], scratch: str, parts: int
) -> list[Staged]:
    """The folds as partials in so many parts, and what the tasks for the parts have staged."""
    staged = []
    for number, folded in enumerate(folds):
        path = f"{scratch}/{number}.arrow"
        write_partials(path, divided.in_parts(target, folded, parts))
        found = divided.linked(target, folded)
        linked = None if found is None else write_partial(f"{scratch}/{number}-linked.arrow", found)
        staged.append(Staged(target.name, number, 5, path, parts=parts, linked=linked))
    return [run_compose(task) for task in composing_of(target, staged, scratch)]
