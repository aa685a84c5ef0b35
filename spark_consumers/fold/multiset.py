"""Folds the changes of a table without a key: by how much the count of each distinct row changes.

Such a table is a multiset. PostgreSQL sends its updates and deletes only with the whole old row (REPLICA
IDENTITY FULL), and each of them removes *one* row that is equal in every column, never all of them. The
order of changes does not matter except for TRUNCATE, so a fold is a signed multiset, and composing is adding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from spark_consumers.fold.keyed import FoldableChanges
from spark_consumers.fold.row_codes import Int64s, row_codes
from walsender_bridge.errors import CorruptError

_INSERT, _UPDATE, _DELETE, _TRUNCATE = b"IUDT"
_WHOLE_OLD = ord("O")


@dataclass(frozen=True)
class MultisetFold:
    """`delta[i]` rows equal to row `i` of `columns` are to be added, or if negative taken away.

    Rows are distinct, and no delta is 0. If `truncated`, the table is empty before.
    """

    truncated: bool
    columns: list[pa.Array]
    delta: Int64s
    #: The number of columns at the end that only have a row's provenance: rows that differ there are equal.
    provenance: int = 0

    def __len__(self) -> int:
        return len(self.delta)

    @property
    def added(self) -> int:
        """By how many rows the table grows (if truncated, from none)."""
        return int(self.delta.sum())

    def rows(self) -> list[pa.Array]:
        """Columns of the rows to add, each as often as it is to be added."""
        return _repeat(self.columns, np.maximum(self.delta, 0))

    def removals(self) -> tuple[list[pa.Array], Int64s]:
        """Columns of the rows to take away, and how many of each."""
        gone = self.delta < 0
        mask = pa.array(gone)
        return [column.filter(mask) for column in self.columns], -self.delta[gone]


def fold_multiset(changes: Sequence[FoldableChanges], provenance: int = 0) -> MultisetFold:
    """Fold changes in commit order; at least one batch, all with the same columns (`provenance`: see `MultisetFold`).

    Raises `CorruptError` for an update or delete without its whole old row.
    """
    truncated = False
    parts: list[tuple[list[pa.Array], Int64s]] = []
    for batch in changes:
        start = 0
        truncates = np.flatnonzero(batch.ops == _TRUNCATE)
        if len(truncates):
            truncated, parts, start = True, [], int(truncates[-1]) + 1
        ops, kinds = batch.ops[start:], batch.old_kind[start:]
        adds = (ops == _INSERT) | (ops == _UPDATE)
        takes = (ops == _UPDATE) | (ops == _DELETE)
        sent = batch.unchanged is None or not batch.unchanged[start:][adds].any()
        if (takes & (kinds != _WHOLE_OLD)).any() or not sent:
            raise CorruptError(
                "an update or delete of a table without a key lacks the whole old row",
                where="change log",
                repair="ALTER TABLE ... REPLICA IDENTITY FULL, then copy the table again",
            )
        if takes.any():
            old = [column.slice(start) for column in batch.old_columns or ()]
            parts.append(_chosen(old, takes, -1))
        parts.append(_chosen([column.slice(start) for column in batch.columns], adds, 1))
    return _sum(truncated, parts, provenance)


def of_signed(columns: list[pa.Array], signs: Int64s) -> MultisetFold:
    """The fold of rows that are each added (1) or taken away (-1), in any order."""
    return _sum(truncated=False, parts=[(columns, signs)], provenance=0)


def compose_multisets(first: MultisetFold, then: MultisetFold) -> MultisetFold:
    """The fold of `first`'s changes followed by `then`'s."""
    if then.truncated:
        return then
    parts = [(first.columns, first.delta), (then.columns, then.delta)]
    return _sum(first.truncated, parts, first.provenance)


def _chosen(columns: list[pa.Array], mask: np.ndarray, sign: int) -> tuple[list[pa.Array], Int64s]:
    chosen = pa.array(mask)
    return [c.filter(chosen) for c in columns], np.full(int(mask.sum()), sign, np.int64)


def _sum(
    truncated: bool, parts: list[tuple[list[pa.Array], Int64s]], provenance: int
) -> MultisetFold:
    columns = [pa.concat_arrays(list(same)) for same in zip(*(p[0] for p in parts), strict=True)]
    delta = np.concatenate([p[1] for p in parts])
    (codes,) = row_codes([columns[: len(columns) - provenance]])
    totals = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    np.add.at(totals, codes, delta)
    place = np.zeros(len(totals), np.int64)
    place[codes[::-1]] = np.arange(len(codes))[::-1]
    # Of equal rows, an added one gives the provenance, rather than a removed one.
    adds = np.flatnonzero(delta > 0)[::-1]
    place[codes[adds]] = adds
    kept = totals != 0
    if truncated and (totals < 0).any():
        raise CorruptError(
            "a row was deleted that the truncated table does not contain",
            where="change log",
            repair="copy the table again; its history in the log has a gap",
        )
    rows = pa.array(place[kept])
    return MultisetFold(truncated, [c.take(rows) for c in columns], totals[kept], provenance)


def _repeat(columns: list[pa.Array], times: Int64s) -> list[pa.Array]:
    rows = pa.array(np.repeat(np.arange(len(times)), times))
    return [column.take(rows) for column in columns]
