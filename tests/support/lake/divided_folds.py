"""The folds of an epoch's ranges, divided and composed by several tasks, one after the other and without Spark."""

from collections.abc import Sequence

from spark_consumers.fold.keyed import Fold
from spark_consumers.fold.multiset import MultisetFold
from spark_consumers.lake.epoch import divided
from spark_consumers.lake.epoch.removal import Located, StageTask, run_stage
from spark_consumers.lake.epoch.stage import ComposeTask, Staged, composing_of, joined, run_compose
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.index.run_format import Run
from spark_consumers.lake.tables.fault import TableFault


def composed_in_parts(
    target: Target, folds: Sequence[Fold | MultisetFold], scratch: str, parts: int
) -> list[Staged]:
    """The folds as partials in so many parts, and what the tasks for the parts have staged."""
    return [run_compose(task) for task in composing(target, folds, scratch, parts)]


def located_in_parts(
    target: Target,
    folds: Sequence[Fold | MultisetFold],
    scratch: str,
    parts: int,
    runs: tuple[Run, ...],
) -> tuple[Staged, list[Located]]:
    """The same together, and what the tasks have found that their parts remove. `runs`: the table's index."""
    staged, located = [], []
    for task in composing(target, folds, scratch, parts):
        ((one, removed),) = run_stage(StageTask(task, (runs, 8)))
        if isinstance(one, TableFault):
            raise one.error
        assert isinstance(one, Staged)
        staged.append(one)
        if isinstance(removed, Located):
            located.append(removed)
    return joined(staged), located


def composing(
    target: Target, folds: Sequence[Fold | MultisetFold], scratch: str, parts: int
) -> list[ComposeTask]:
    """The tasks that compose the folds."""
    staged = []
    for number, folded in enumerate(folds):
        path, linked = divided.write(f"{scratch}/{number}", target, folded, parts)
        staged.append(Staged(target.name, number, 5, path, parts=parts, linked=linked))
    return composing_of(target, staged, scratch)
