"""One table's part of an epoch while it is completed: which tasks are next, and what they have found. No I/O."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spark_consumers.lake.epoch.complete import Completed, CompleteTask, Indexed, IndexTask
from spark_consumers.lake.epoch.removal import Located, RemovalTask, Removed
from spark_consumers.lake.epoch.stage import Patches, Staged
from spark_consumers.lake.epoch.table_changes import Moved
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.table_format import FileInfo, RowIds
from spark_consumers.lake.index.run_format import Run


@dataclass
class Draft:
    """What is to be written of a table, after `base`.

    `runs`: its index, before this epoch and in the end after it; None: it has to be built. `damage`: why that is so after
    all. `located`: what the parts of the changes remove. `row_ids`: of its data files, for those that are rewritten.
    """

    target: Target
    staged: Staged
    base: int
    runs: tuple[Run, ...] | None
    removed: Removed = field(init=False)
    is_found: bool = False
    done: list[Completed] = field(default_factory=list)
    damage: str = ""
    located: tuple[Located, ...] = ()
    row_ids: Mapping[str, RowIds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.removed = Removed(self.target.name)
        if self.staged.truncated:
            # The index starts over with the table.
            self.runs = ()

    def begin_again(self, target: Target) -> None:
        """Build the index, and then do everything again, with files of other names."""
        self.target, self.runs = target, None
        self.removed, self.done, self.damage = Removed(target.name), [], ""
        self.is_found, self.located = False, ()

    def locate(self, located: Sequence[Located]) -> None:
        """Take what the parts have found."""
        damaged = [part.damage for part in located if part.damage]
        lacking = [part.lacks for part in located if part.lacks]
        if lacking:
            self.found(Removed(self.target.name, lacks=lacking[0]))
        elif damaged:
            self.found(Removed(self.target.name, damage=damaged[0]))
        else:
            self.located = tuple(located)

    @property
    def rows(self) -> list[FileInfo]:
        """The files of rows that are added."""
        return [*self.staged.rows, *(file for done in self.done for file in done.rows)]

    @property
    def moves(self) -> list[Moved]:
        """The rows that go into other files as they are."""
        return [done.moved for done in self.done if done.moved is not None]

    def removal(self, scratch: str, small_files: int) -> RemovalTask:
        """Find what is removed."""
        assert self.runs is not None
        return RemovalTask(self.target, self.staged, self.runs, scratch, small_files, self.located)

    def found(self, removed: Removed) -> None:
        """Take what was found."""
        self.removed, self.damage, self.is_found = removed, removed.damage, True
        if removed.runs is not None:
            self.runs = removed.runs

    def completing(self) -> Iterator[CompleteTask]:
        """Complete the rows of the table's own files."""
        begun: set[Patches] = set()
        for number, patched in enumerate(self.removed.patched):
            patches = patched.patches
            # Whole rows go with the first group of their patches.
            rows = None if patches in begun else patches.rows
            begun.add(patches)
            yield CompleteTask(
                self.target,
                number,
                patched=patched,
                patches=patches.file.path,
                rows=None if rows is None else rows.path,
            )
        for number, rewrite in enumerate(self.removed.rewrites):
            ids = tuple(self.row_ids.get(file.name) for file in rewrite.files)
            with_ids = replace(rewrite, row_ids=ids if self.row_ids else ())
            yield CompleteTask(self.target, number, rewrite=with_ids)

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
