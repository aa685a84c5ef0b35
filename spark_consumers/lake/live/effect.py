"""The net effect of a fold on its table, as rows that a query can join with the table's. Pure.

Each row has a `KIND`:

- `ADDED`: a row of the table, `c0`, `c1`, ... by the positions of its columns;
- `GONE`: a row that is not in the table any more. With a key: the row that has it (`g0`, `g1`, ...). Without one: `n` rows that
  equal `c0`, `c1`, ...; `i` is another number for each;
- `PATCHED`: the row of the table that has the key `g0`, `g1`, ... is replaced by `c0`, `c1`, ..., of which those that `u0`, `u1`,
  ... mark were never sent (unchanged TOAST) and stay as they are in the table.

A row of the table is gone or patched once at most, since a fold has each key once, and a row moves to one other key. A table that keeps
deleted rows or versions may have several patches of one row, whose values were copied to other keys: each of them is a row. The key is what identifies
the rows of the lake's table (`Target.identity`).
"""

from typing import Final

import numpy as np
import pyarrow as pa

from spark_consumers.fold.keyed import PATCH, Bools, Fold
from spark_consumers.fold.multiset import MultisetFold
from spark_consumers.fold.row_codes import row_codes
from spark_consumers.lake.epoch import quarantine
from spark_consumers.lake.epoch.divided import Share
from spark_consumers.lake.epoch.stage import of_table, with_held
from spark_consumers.lake.epoch.target import Target

KIND: Final = "kind"
ADDED, GONE, PATCHED = range(3)


def effect_schema(target: Target) -> pa.Schema:
    """What `effect` returns for this table."""
    types = target.columns.types
    fields = [(KIND, pa.int8()), *((f"c{i}", kind) for i, kind in enumerate(types))]
    if not target.key:
        return pa.schema([*fields, ("n", pa.int64()), ("i", pa.int64())])
    places = (target.columns.get_field_index(name) for name in target.identity)
    fields += [(f"g{i}", types[position]) for i, position in enumerate(places)]
    fields += [(f"u{i}", pa.bool_()) for i in range(len(types))]
    return pa.schema(fields)


def effect(
    target: Target, folded: Fold | MultisetFold | None, share: Share | None = None
) -> pa.Table:
    """The effect of all changes of a table, or of one share of them.

    Raises `CorruptError` if they contradict the table's quarantined rows.
    """
    folded = with_held(target, folded, share)
    with of_table(target):
        if isinstance(folded, MultisetFold):
            return _of_multiset(target, folded, 0 if share is None else share.part)
        return _of_keyed(target, folded)


def _of_multiset(target: Target, folded: MultisetFold, part: int) -> pa.Table:
    width = len(target.columns)
    if len(folded.columns) > width:
        folded, _ = quarantine.multiset_parts(folded, width)
    gone, counts = folded.removals()
    ids = pa.array(np.arange(len(counts)) + (part << 40))
    return pa.concat_tables(
        [
            _rows(target, ADDED, {f"c{i}": c for i, c in enumerate(folded.rows())}),
            _rows(
                target,
                GONE,
                {**{f"c{i}": c for i, c in enumerate(gone)}, "n": pa.array(counts), "i": ids},
            ),
        ]
    )


def _of_keyed(target: Target, folded: Fold) -> pa.Table:
    width, keys = len(target.columns), len(target.identity)
    added = folded.rows()
    shown = np.ones(len(folded.patches), np.bool_)
    if len(folded.columns) > width:
        added = quarantine.parts(folded, width).rows
        # What was sent is unrepresentable: the row is quarantined when the epoch is written.
        shown = ~quarantine.is_unrepresentable(folded.columns, width)[folded.patches]
    patched = folded.patches[shown]
    at = pa.array(patched)
    patches = {f"c{i}": column.take(at) for i, column in enumerate(folded.columns[:width])}
    deletes = folded.deletes()[:keys]
    if len(patched):
        assert folded.unset is not None
        assert folded.source is not None
        source = [column.take(at) for column in folded.source[:keys]]
        patches |= {f"g{i}": column for i, column in enumerate(source)}
        patches |= {f"u{i}": pa.array(folded.unset[patched, i]) for i in range(width)}
        stays = pa.array(~_are_among(deletes, source))
        deletes = [column.filter(stays) for column in deletes]
    return pa.concat_tables(
        [
            _rows(target, ADDED, {f"c{i}": column for i, column in enumerate(added)}),
            _rows(target, GONE, {f"g{i}": column for i, column in enumerate(deletes)}),
            *([_rows(target, PATCHED, patches)] if len(patched) else []),
        ]
    )


def _are_among(keys: list[pa.Array], others: list[pa.Array]) -> Bools:
    """Which of the keys are among the others."""
    ours, theirs = row_codes([keys, others])
    found: Bools = np.isin(ours, theirs)
    return found


def _rows(target: Target, kind: int, columns: dict[str, pa.Array]) -> pa.Table:
    """Rows of one kind; what they do not have is NULL."""
    count = len(next(iter(columns.values())))
    arrays = []
    for field in effect_schema(target):
        if field.name == KIND:
            column = pa.array(np.full(count, kind, np.int8))
        else:
            column = columns.get(field.name)
        if column is None:
            column = pa.nulls(count, field.type)
        arrays.append(column if column.type == field.type else column.cast(field.type))
    return pa.Table.from_arrays(arrays, schema=effect_schema(target))


def has_patches(folded: Fold | MultisetFold) -> bool:
    """Whether some of its rows are patches."""
    return isinstance(folded, Fold) and bool((folded.state == PATCH).any())
