"""The writer's decision on an offer, and the removals that are carried over into its files. Pure.

An offer was made of an earlier snapshot than the writer's newest one. Since then epochs may have removed rows of the old
files, or replaced these, or emptied the table; it may have been copied again; another writer may have taken over. What makes an
acceptance right:

- The offer's term is the writer's own. So nobody else can accept it, and the old files' history is this writer's: a lake that
  goes on from an earlier link, after the newest ones were lost, does so under another term.
- The table has the folder and the key that it had. Data files are immutable, no name is used twice, and vectors only grow while a
  term lasts. So of an old file that is still one of the table's, the rows that are alive are those that were, without the
  positions that its vector has now and had not then. Of an old file that has gone, no row is alive, or it is in another file by now.
- Living rows kept their order, so a position p of an old file is `start + p - (how many were removed below p)` in the new one.

New columns change nothing: rows of both old and new files have NULL there, or the column's initial default. (Without a key, a default is in
the digests of rows, so the table must have the same columns.) Nor do new names: columns are found by their numbers.

All of this is said by the row index, and the table's snapshot is what readers see. So where the two differ in the old files, nothing
is decided by the index alone: the offer is not made, and not accepted (`strays`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from pyroaring import BitMap64

from spark_consumers.lake.compaction.offer import Offer, OldFile, bitmap, columns_of, serialized
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
    """The offer's files take the place of the old ones.

    `removed`: of each new file, by its number, the positions of the rows that were removed since.
    """

    removed: Mapping[int, BitMap64]


@dataclass(frozen=True, slots=True)
class CurrentFile:
    """A data file of the table now: the Puffin file of its vector (none: nothing is removed), and how to read what that removes."""

    vector: str = ""
    removed: Callable[[], BitMap64] = BitMap64


def decide(
    offer: Offer,
    table: TableVersion | None,
    term: int,
    current: Mapping[str, CurrentFile],
    there: Callable[[], Collection[str]],
    *,
    copies_on_write: bool = False,
) -> Accepted | Refused:
    """What a writer of this term does with an offer, for `table` as its newest link has it.

    `current`: its data files by its row index; `there`: the names of those of its snapshot, for a table that is there.
    `copies_on_write`: whether no data file of the table may have removed rows.
    """
    if offer.term != term:
        return Refused(f"it was made under term {offer.term}, but the present term is {term}")
    if table is None or table.path != offer.path:
        return Refused("the table was copied again or dropped")
    if table.state != LIVE:
        return Refused(f"the table is {table.state}")
    if table.runs is None:
        return Refused("the table's row index must be built first")
    if table.key != offer.key:
        return Refused("the table has another key")
    if not {*offer.columns} <= {*columns_of(table)}:
        # Rows without a key, or of a wider key, have other digests now than in the offer's run.
        return Refused("a column was dropped, or has another type")
    if not table.key and len(columns_of(table)) > len(offer.columns):
        return Refused("it has no key, and a column was added")
    if offer.merges:
        names = [run for run, _ in table.runs]
        if _place(names, offer.merges) is None:
            return Refused("its row index was merged meanwhile")
        return Accepted({})
    if strayed := strays((file.name for file in offer.old), current, there()):
        return Refused(f"the table's snapshot and its row index differ in {strayed[0]}")
    try:
        removed = carried(offer, current)
    except ValueError as error:
        return Refused(str(error))
    if copies_on_write and removed:
        return Refused("rows were removed meanwhile, and the table has no deletion vectors")
    rows, gone = sum(f.rows for f in offer.files), sum(map(len, removed.values()))
    if 2 * gone > rows or any(len(removed[n]) == offer.files[n].rows for n in removed):
        return Refused(f"{gone} of its {rows} rows were removed or moved meanwhile")
    return Accepted(removed)


def strays(names: Iterable[str], current: Collection[str], there: Collection[str]) -> list[str]:
    """Those of these data files that only the table's row index has, or only its snapshot."""
    return [name for name in names if (name in current) != (name in there)]


def with_merged(runs: Sequence[tuple[str, int]], offer: Offer) -> tuple[tuple[str, int], ...]:
    """The table's runs, with the offer's in the place of those that it merges, which are there."""
    place = _place([run for run, _ in runs], offer.merges)
    assert place is not None
    return (*runs[:place], (offer.run, offer.weight), *runs[place + len(offer.merges) :])


def _place(names: Sequence[str], merges: Sequence[str]) -> int | None:
    """Where these runs are among the table's, one after the other."""
    places = range(len(names) - len(merges) + 1)
    return next((n for n in places if tuple(names[n : n + len(merges)]) == tuple(merges)), None)


def carried(offer: Offer, current: Mapping[str, CurrentFile]) -> dict[int, BitMap64]:
    """The positions to remove from the offer's files, by their numbers.

    Raises `ValueError` if an old file has rows again that were removed: then it is not the file that the offer was made of.
    """
    found: dict[int, BitMap64] = {}
    for file in offer.old:
        now = current.get(file.name)
        if now is not None and now.vector == file.vector:
            continue
        then = bitmap(file.removed)
        gone = BitMap64(range(file.rows)) if now is None else now.removed()
        if not then <= gone:
            raise ValueError(f"{file.name} has rows again that were removed")
        more = _array(gone - then)
        if len(more):
            moved = file.start + more - np.searchsorted(_array(then), more)
            found.setdefault(file.new, BitMap64()).update(BitMap64(moved.astype(np.uint64)))
    return found


def _array(positions: BitMap64) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    return np.frombuffer(positions.to_array(), np.uint64).astype(np.int64)
