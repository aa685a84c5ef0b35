"""How the folds of a table's ranges are divided, so that several tasks compose them: by the digests of the keys.

Only equal keys have to meet in a task (of a table without a key, equal rows), so each part of all ranges is composed by a task of
its own. A patch takes what was not sent from the row with the key `source` (`fold.keyed`). That is its own key, unless the key
was changed on the way: such a patch *links* two keys, which may be in two parts. The linked keys of all ranges are therefore left
out of every part, and composed by one more task, which finds them in all parts. A key that no patch links needs no
other key; and what a linked key needs is linked as well. So the result is that of one task.

Where a value of the key is unrepresentable, it is NULL here, and all such keys are in one part: each epoch's quarantined rows go
to the parts that have their keys.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from spark_consumers.fold.keyed import Bools, Fold
from spark_consumers.fold.multiset import MultisetFold
from spark_consumers.fold.serial import fold_from_table, fold_to_table
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.data_files import read_partial, write_partial, write_partials
from spark_consumers.lake.index.build import Identity
from spark_consumers.lake.index.digests import UInt64s


@dataclass(frozen=True)
class Share:
    """What one task composes of a table: a part of so many, or, as the last one, the keys in the files `linked`."""

    part: int
    parts: int
    linked: tuple[str, ...] = ()

    @property
    def is_of_linked(self) -> bool:
        """Whether this is the share of the linked keys."""
        return self.part == self.parts


def shares(parts: int, linked: Sequence[str]) -> Iterator[Share | None]:
    """The shares of a table's tasks; None: of its one task, which composes everything."""
    if parts == 1:
        yield None
        return
    for part in range(parts + bool(linked)):
        yield Share(part, parts, tuple(linked))


def in_parts(target: Target, folded: Fold | MultisetFold, parts: int) -> list[pa.Table]:
    """The fold in so many parts; equal keys (or rows, without a key) are in the part of the same number in every fold."""
    table = fold_to_table(folded)
    if parts == 1:
        return [table]
    number = _halves(target, _identifying(target, folded)) % np.uint64(parts)
    order = np.argsort(number, kind="stable")
    rows = np.split(order, np.searchsorted(number[order], np.arange(1, parts)))
    return [table.take(pa.array(some)) for some in rows]


def write(
    path: str, target: Target, folded: Fold | MultisetFold, parts: int
) -> tuple[str, str | None]:
    """Write the fold in so many parts, and the keys that it links: both files, whose names begin with `path`; None: no keys."""
    partial = write_partials(f"{path}.arrow", in_parts(target, folded, parts))
    keys = linked(target, folded) if parts > 1 else None
    return partial, None if keys is None else write_partial(f"{path}-linked.arrow", keys)


def linked(target: Target, folded: Fold | MultisetFold) -> pa.Table | None:
    """The halves of the digests of keys that patches link to another; None: there are none."""
    if isinstance(folded, MultisetFold) or folded.source is None:
        return None
    at = pa.array(folded.patches)
    width = len(target.key)
    own, source = (
        _halves(target, [column.take(at) for column in columns[:width]])
        for columns in (folded.keys, folded.source)
    )
    moved = own != source
    if not moved.any():
        return None
    return pa.table({"high": pa.array(np.unique(np.concatenate([own[moved], source[moved]])))})


def read(path: str, target: Target, share: Share) -> pa.Table:
    """The share of a partial that `in_parts` has divided."""
    if not share.is_of_linked:
        return _of_share(read_partial(path, share.part), target, share)
    # One part after the other: they are as large as all of the table's changes, and few keys are linked.
    parts = (read_partial(path, part) for part in range(share.parts))
    return pa.concat_tables([_of_share(table, target, share) for table in parts])


def chosen(folded: Fold | MultisetFold, target: Target, share: Share) -> Fold | MultisetFold:
    """The share of a fold that is not divided."""
    table = fold_to_table(folded)
    if not share.is_of_linked:
        number = _halves(target, _identifying(target, folded)) % np.uint64(share.parts)
        table = table.filter(pa.array(number == share.part))
    return fold_from_table(_of_share(table, target, share))


def _of_share(table: pa.Table, target: Target, share: Share) -> pa.Table:
    """Those of the rows that are linked, or those that are not."""
    if not share.linked:
        return table
    keys = _identifying(target, fold_from_table(table))
    is_linked: Bools = np.isin(_halves(target, keys), _known(share.linked))
    return table.filter(pa.array(is_linked if share.is_of_linked else ~is_linked))


def _known(paths: Sequence[str]) -> UInt64s:
    return np.concatenate([read_partial(path)["high"].to_numpy() for path in paths])


def _identifying(target: Target, folded: Fold | MultisetFold) -> list[pa.Array]:
    """The columns by which rows are the same, without the texts of unrepresentable values (`quarantine`)."""
    if isinstance(folded, MultisetFold):
        return folded.columns[: len(target.columns)]
    return folded.keys[: len(target.key)]


def _halves(target: Target, columns: Sequence[pa.Array]) -> UInt64s:
    """The upper halves of the digests: keys that have the same are treated alike, equal or not."""
    return Identity.of(target.key, target.file_schema).digests(columns).high
