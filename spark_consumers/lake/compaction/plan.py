"""Which data files of which tables are worth rewriting, and which come first. Pure.

A reader opens each data file, and the deletion vector of each that has one. So what a rewrite gains is counted in files that
a reader opens less. Three rules keep a row from being written again and again:

- a file of at least half the target that has few removed rows stays as it is;
- smaller files are joined as the runs of a log-structured merge tree are: a file takes part only while it is at most `_RATIO`
  times as large as all smaller ones together, so each rewrite at least multiplies the size of the file that a row is in;
- nothing is done that gains fewer than `_LEAST` files, but for files with many removed rows.

How many removed rows are many depends on whether the table is settled, that is, has not changed for a while. What a reader pays for a
vector hardly depends on how many rows it removes: Iceberg looks up the position of each row of a data file that has one.
While a table changes, a file would soon get the next vector, so only a tenth is worth writing it again. Once it is settled, a
hundredth is: that is paid once, and each reader gains.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from spark_consumers.lake.layout.arrangement import NO_PARTITION

#: Of a data file's rows, the part that has to be removed for it to be rewritten whatever its size; and once its table is settled.
_DEAD, _DEAD_SETTLED = 0.1, 0.01
#: How much larger a file may be than all smaller ones together to be joined with them.
_RATIO = 2
#: Files that are joined whatever their sizes, in bytes: opening one costs more than reading it.
_TINY = 1 << 20
#: Rows of one table that are rewritten for one plan: their digests are in memory at a time, 24 bytes each.
_ROWS = 10_000_000
#: Files that a rewrite has to gain.
_LEAST = 3


@dataclass(frozen=True, slots=True)
class FileState:
    """A data file of a snapshot: its path below the table's folder, its rows, its bytes, how many rows are removed, its partition."""

    name: str
    rows: int
    size: int
    removed: int = 0
    partition: str = NO_PARTITION

    @property
    def living(self) -> int:
        """About how many bytes its living rows have."""
        return self.size * (self.rows - self.removed) // max(self.rows, 1)

    def is_dead(self, *, is_settled: bool) -> bool:
        """Whether so many rows are removed that it is rewritten for them."""
        part = _DEAD_SETTLED if is_settled else _DEAD
        return self.removed >= part * self.rows and self.removed > 0

    @property
    def opened(self) -> int:
        """The files that a reader opens for it."""
        return 2 if self.removed else 1


@dataclass(frozen=True, slots=True)
class Group:
    """Data files of one partition of a table, whose living rows become one file."""

    files: tuple[FileState, ...]

    @property
    def bytes(self) -> int:
        """The bytes that are read for it."""
        return sum(file.size for file in self.files)

    @property
    def rows(self) -> int:
        """The rows that are written."""
        return sum(file.rows - file.removed for file in self.files)

    @property
    def gain(self) -> int:
        """The files that a reader opens less, once it is rewritten."""
        return sum(file.opened for file in self.files) - 1


def groups(files: Iterable[FileState], target: int, *, is_settled: bool = False) -> list[Group]:
    """What to rewrite of one table: groups that become files of about `target` bytes, those that gain most first.

    `is_settled`: whether the table has not changed for a while.
    """
    by_partition: dict[str, list[FileState]] = {}
    for file in files:
        by_partition.setdefault(file.partition, []).append(file)
    due = [
        group
        for some in by_partition.values()
        for group in _in_partition(some, target, is_settled=is_settled)
    ]
    return sorted(due, key=lambda group: (-group.gain, group.bytes, group.files[0].name))


def _in_partition(files: Iterable[FileState], target: int, *, is_settled: bool) -> list[Group]:
    found = sorted(files, key=lambda file: (file.living, file.name))
    dead = [file for file in found if file.is_dead(is_settled=is_settled)]
    others = [file for file in found if not file.is_dead(is_settled=is_settled)]
    joined = _joined([file for file in others if 2 * file.living < target])
    if len(joined) <= _LEAST:
        joined = joined if dead else []
    made = [Group(tuple(some)) for some in _packed([*joined, *dead], target)]
    return [g for g in made if g.gain >= _LEAST or any(file in dead for file in g.files)]


def _joined(small: Sequence[FileState]) -> list[FileState]:
    """Of small files, the smallest first, those that are joined: up to the largest for which that is worth it."""
    count = total = 0
    for number, file in enumerate(small, 1):
        if file.living <= max(_RATIO * total, _TINY):
            count = number
        total += file.living
    return list(small[:count])


def _packed(files: Iterable[FileState], target: int) -> list[list[FileState]]:
    """The files in stretches of about `target` living bytes, in the order of their names: rows of one time stay together."""
    stretches: list[list[FileState]] = []
    size = 0
    for file in sorted(files, key=lambda file: file.name):
        if not stretches or (size and size + file.living > target):
            stretches.append([])
            size = 0
        stretches[-1].append(file)
        size += file.living
    return stretches


def choose(
    tables: Mapping[str, Collection[Group]], limit: int, room: float
) -> dict[str, list[Group]]:
    """What is done now of what is due, in at most `limit` bytes: tables with the most to gain first.

    At least one group, however large: it would never be done otherwise. But none for which there is no `room`, in bytes, since
    epochs need the disk, too.
    """
    chosen: dict[str, list[Group]] = {}
    left = limit
    by_gain = sorted(tables, key=lambda name: (-sum(g.gain for g in tables[name]), name))
    for name in by_gain:
        rows = 0
        for group in tables[name]:
            fits = group.bytes <= left and (not rows or rows + group.rows <= _ROWS)
            if group.bytes <= room and (fits or not chosen):
                chosen.setdefault(name, []).append(group)
                left -= group.bytes
                room -= group.bytes
                rows += group.rows
    return chosen
