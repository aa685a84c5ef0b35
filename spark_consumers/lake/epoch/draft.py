"""One table's part of an epoch while it is completed: which tasks are next, and what they have found. No I/O."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from spark_consumers.lake.epoch.complete import Completed, CompleteTask, Indexed, IndexTask
from spark_consumers.lake.epoch.removal import RemovalTask, Removed
from spark_consumers.lake.epoch.stage import Staged
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.table_format import FileInfo
from spark_consumers.lake.index.run_format import Run


@dataclass
class Draft:
    """What is to be written of a table, after `base`.

    `runs`: its index, before this epoch and in the end after it; None: it has to be built. `damage`: why that is so after
    all.
    """

    target: Target
    staged: Staged
    base: int
    runs: tuple[Run, ...] | None
    removed: Removed = field(init=False)
    is_found: bool = False
    done: list[Completed] = field(default_factory=list)
    damage: str = ""

    def __post_init__(self) -> None:
        self.removed = Removed(self.target.name)
        if self.staged.truncated:
            # The index starts over with the table.
            self.runs = ()

    def begin_again(self, target: Target) -> None:
        """Build the index, and then do everything again, with files of other names."""
        self.target, self.runs = target, None
        self.removed, self.done, self.damage = Removed(target.name), [], ""
        self.is_found = False

    @property
    def rows(self) -> list[FileInfo]:
        """The files of rows that are added."""
        own = [] if self.staged.rows is None or self.staged.patches else [self.staged.rows]
        return [*own, *(done.rows for done in self.done if done.rows is not None)]

    def removal(self, scratch: str, small_files: int) -> RemovalTask:
        """Find what is removed."""
        assert self.runs is not None
        return RemovalTask(self.target, self.staged, self.runs, scratch, small_files)

    def found(self, removed: Removed) -> None:
        """Take what was found."""
        self.removed, self.damage, self.is_found = removed, removed.damage, True
        if removed.runs is not None:
            self.runs = removed.runs

    def completing(self) -> Iterator[CompleteTask]:
        """Complete the rows of the table's own files."""
        patches, rows = self.staged.patches, self.staged.rows
        for number, patched in enumerate(self.removed.patched):
            assert patches is not None
            yield CompleteTask(
                self.target,
                number,
                patched=patched,
                patches=patches.path,
                rows=rows.path if rows is not None and not number else None,
            )
        for number, rewrite in enumerate(self.removed.rewrites):
            yield CompleteTask(self.target, number, rewrite=rewrite)

    def completed(self, done: Completed) -> None:
        """Take what was completed."""
        self.done.append(done)

    def indexing(self) -> IndexTask | None:
        """Add the rows to the index, if that is still to do."""
        if self.damage or self.removed.runs is not None:
            return None
        assert self.runs is not None
        return IndexTask(self.target, self.runs, tuple(self.rows), self.removed)

    def indexed(self, indexed: Indexed) -> None:
        """Take the new index."""
        if indexed.damage:
            self.damage = indexed.damage
        else:
            self.runs = indexed.runs
