"""The writer's decision on an offer, and the removals that are carried over into its files. Pure.

An offer was made of an earlier snapshot than the writer's newest one. Since then epochs may have removed rows of the old
files, replaced these, or emptied the table; it may have been copied again; another writer may have taken over. What makes an
acceptance right:

- The offer's term is the writer's own. So nobody else can accept it, and the old files' history is this writer's: a lake that
  goes on from an earlier link, after the newest ones were lost, does so under another term.
- The table has the folder and the key that it had, and every old file is still one of its files. Files are immutable, and
  vectors only grow while a term lasts. So the rows of the new files are those of the old ones, without what was removed since.
- What was removed since are the positions in the vector now that were not in it then. Living rows kept their order, so a
  position p of an old file is `start + p - (how many were removed below p)` in the new one.

New columns change nothing: rows of both old and new files have NULL there. In a table that is copied on write, a file with rows
that were removed since is not there any more.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pyroaring import BitMap64

from spark_consumers.lake.compaction.offer import Offer, OldFile, bitmap, serialized
from spark_consumers.lake.manifest.table_version import LIVE, TableVersion


def mapped(files: Sequence[tuple[str, int, str, BitMap64]], new: int) -> Iterator[OldFile]:
    """The map of files whose living rows go, in this order, into the offer's file number `new`.

    Of each its name, how many rows it has, the Puffin file of its vector (none: nothing is removed), and what that removes.
    """
    start = 0
    for name, rows, vector, removed in files:
        yield OldFile(name, rows, vector, serialized(removed), new, start)
        start += rows - len(removed)


@dataclass(frozen=True, slots=True)
class Refused:
    """The offer changes nothing; why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """The offer's files take the place of the old ones. `changed`: the old files of which rows were removed since."""

    changed: frozenset[str]


@dataclass(frozen=True, slots=True)
class CurrentFile:
    """A data file of the table now: the Puffin file of its vector (none: nothing is removed), and how many rows that removes."""

    vector: str = ""
    removed: int = 0


def decide(
    offer: Offer,
    table: TableVersion | None,
    term: int,
    current: Mapping[str, CurrentFile],
) -> Accepted | Refused:
    """What a writer of this term does with an offer, for `table` as its newest link has it, with these data files."""
    if offer.term != term:
        return Refused(f"it was made under term {offer.term}, and this is term {term}")
    if table is None or table.path != offer.path:
        return Refused("the table was copied again, or has gone")
    if table.state != LIVE:
        return Refused(f"the table is {table.state}")
    if table.runs is None:
        return Refused("the table's row index has to be built first")
    if table.key != offer.key:
        return Refused("the table has another key")
    missing = [file.name for file in offer.old if file.name not in current]
    if missing:
        return Refused(f"{len(missing)} of its {len(offer.old)} data files were replaced since")
    changed = {file.name for file in offer.old if current[file.name].vector != file.vector}
    return Accepted(frozenset(changed))


def carried(offer: Offer, now: Mapping[str, BitMap64]) -> dict[int, BitMap64]:
    """The positions to remove from the offer's files, by their numbers.

    `now`: the positions that are removed from the old files that have changed since. Raises `ValueError` if an old file has
    rows again that were removed: then it is not the file that the offer was made of.
    """
    found: dict[int, BitMap64] = {}
    for file in offer.old:
        if file.name not in now:
            continue
        then = bitmap(file.removed)
        if not then <= now[file.name]:
            raise ValueError(f"{file.name} has rows again that were removed")
        more = _array(now[file.name] - then)
        if not len(more):
            continue
        moved = file.start + more - np.searchsorted(_array(then), more)
        found.setdefault(file.new, BitMap64()).update(BitMap64(moved.astype(np.uint64)))
    return found


def _array(positions: BitMap64) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.frombuffer(positions.to_array(), np.uint64).astype(np.int64)
