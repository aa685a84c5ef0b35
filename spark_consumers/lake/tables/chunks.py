"""Which changes a table still lacks whose copy was read in chunks, each from a snapshot of its own. Pure.

A chunk is a range of the first column of the key (`TableVersion.chunks`: where each ends, and the LSN of its snapshot). A
row is in its chunk as it was at that LSN, so of the changes of one key exactly those are missing whose commit record starts
at or above the LSN of the key's chunk. That holds for each key by itself, whatever happened between the snapshots.

An UPDATE of the key is a DELETE of the old one and an INSERT of the new one, which may be in two chunks:

| the old key's chunk | the new key's chunk | what is missing |
|---|---|---|
| was read before it | was read before it | the update |
| was read before it | has the new row | the removal of the old row |
| lacks the old row | was read before it | the new row |
| lacks the old row | has the new row | nothing |

In the third case nothing has a value that was not sent (an unchanged TOAST value): then the table has to be copied again. So it
has if it had another replica identity between two chunks: the update of a key is then sent without the old one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from spark_consumers.decode.entries import ChangeBatch, rows_of
from spark_consumers.decode.types import INT2, INT4, INT8, UUID
from spark_consumers.lake.manifest.table_version import Chunk
from spark_consumers.lake.tables.schema_match import unexpected
from walsender_bridge.change_log.entry import NAMED_OTHERWISE
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.pgoutput import DELETE, INSERT, TRUNCATE, UPDATE, Relation

#: The types of a first key column by which tables are read in chunks.
CHUNKED_BY: Final = frozenset({INT2, INT4, INT8, UUID})

Bools = npt.NDArray[np.bool_]
_NO_UUID: Final = "00000000-0000-0000-0000-000000000000"
#: Where the digits of the first eight bytes are in the text of a UUID.
_DIGITS: Final = ((0, 8), (9, 13), (14, 18))


def missing(
    batch: ChangeBatch,
    start_lsn: Lsn,
    chunks: Sequence[Chunk],
    key: Sequence[str],
    columns: Sequence[str],
) -> tuple[ChangeBatch, str | None]:
    """The changes of the batch that the copy lacks; and why the table has to be copied again instead, or None.

    `start_lsn`: of the copy's last snapshot. `chunks`: in the order of their keys, so also of their LSNs; empty: there was
    one snapshot. `key`: the names of the key's columns; `columns`: of all, perhaps with some at the end that came later.
    """
    if not len(batch) or batch.commit_lsn[0] >= start_lsn:
        return batch, None
    first = chunks[0][1] if chunks else start_lsn
    if batch.commit_lsn[0] < first:
        batch = rows_of(batch, batch.commit_lsn >= first)
    if not len(batch) or len(chunks) < 2 or batch.unmaskable:
        return batch, None
    at = _position(batch.relation, key, columns)
    if at is None:
        # Also if it was so for a while only: the changes that say so may be ones that the copy does not lack.
        return batch, "it had another key, or other columns, while it was copied"
    if NAMED_OTHERWISE in unexpected(batch, {}):
        return batch, "one of its partitions had another replica identity while it was copied"
    if ((batch.ops == TRUNCATE) & (batch.commit_lsn < start_lsn)).any():
        return batch, "it was truncated while it was copied"
    return _by_key(batch, chunks, at)


def _position(relation: Relation, key: Sequence[str], columns: Sequence[str]) -> int | None:
    """Which column the chunks are ranges of; None if these changes do not tell the key as the copy has it.

    By another identity, the update of a key is sent without the old one. And a name may have been another column's.
    """
    names = [column.name for column in relation.columns]
    if relation.key != set(key) or names != list(columns[: len(names)]):
        return None
    at = names.index(key[0])
    return at if relation.columns[at].type_oid in CHUNKED_BY else None


def _by_key(batch: ChangeBatch, chunks: Sequence[Chunk], at: int) -> tuple[ChangeBatch, str | None]:
    new = batch.columns[at]
    old = new
    if batch.old_columns is not None:
        has_old = pa.array(batch.old_kind != 0)
        old = pc.if_else(has_old, batch.old_columns[at], new)
    is_new_missing = _is_missing(batch, new, chunks) & (batch.ops != DELETE)
    is_old_missing = _is_missing(batch, old, chunks) & (batch.ops != INSERT)
    # A TRUNCATE has no key, and comes after all chunks.
    kept = is_new_missing | is_old_missing | (batch.ops == TRUNCATE)
    updates = batch.ops == UPDATE
    removals = updates & is_old_missing & ~is_new_missing
    additions = updates & is_new_missing & ~is_old_missing
    if batch.unchanged is not None and batch.unchanged[additions].any():
        return batch, "its key was updated while it was copied, without an unchanged TOAST value"
    if removals.any() or additions.any():
        batch = _apart(batch, removals, additions)
    return rows_of(batch, kept), None


def _is_missing(batch: ChangeBatch, keys: pa.Array, chunks: Sequence[Chunk]) -> Bools:
    """Whether each change came after the chunk of its key was read; of a change without one, False."""
    uppers = np.array([upper for upper, _ in chunks[:-1]], np.int64)
    lsns = np.array([lsn for _, lsn in chunks], np.uint64)
    chunk = np.searchsorted(uppers, numbers_of(keys), side="right")
    found: Bools = (batch.commit_lsn >= lsns[chunk]) & pc.is_valid(keys).to_numpy(
        zero_copy_only=False
    )
    return found


def numbers_of(keys: pa.Array) -> npt.NDArray[np.int64]:
    """The keys as numbers in PostgreSQL's order (`key_ranges.ordinal_of`); any number for NULL."""
    if not pa.types.is_string(keys.type):
        found: npt.NDArray[np.int64] = pc.fill_null(keys.cast(pa.int64()), 0).to_numpy(
            zero_copy_only=False
        )
        return found
    texts = pc.fill_null(keys, _NO_UUID)
    parts = [pc.utf8_slice_codeunits(texts, *place) for place in _DIGITS]
    digits = pc.binary_join_element_wise(*parts, "").to_numpy(zero_copy_only=False)
    codes = digits.astype("S16").view(np.uint8).reshape(-1, 16)
    # PostgreSQL writes 0 to 9 and a to f.
    nibbles = np.where(codes <= ord("9"), codes - ord("0"), codes - ord("a") + 10).astype(np.uint64)
    first = np.bitwise_or.reduce(nibbles << np.arange(60, -1, -4, dtype=np.uint64), axis=1)
    numbers: npt.NDArray[np.int64] = (first ^ np.uint64(1 << 63)).view(np.int64)
    return numbers


def _apart(batch: ChangeBatch, removals: Bools, additions: Bools) -> ChangeBatch:
    """The batch with these updates of the key as a DELETE of the old one, or as an INSERT of the new one."""
    ops, old_kind = batch.ops.copy(), batch.old_kind.copy()
    ops[removals], ops[additions], old_kind[additions] = DELETE, INSERT, 0
    gone = pa.array(removals)

    def without(column: pa.Array) -> pa.Array:
        return pc.if_else(gone, pa.scalar(None, column.type), column)

    unchanged = batch.unchanged
    if unchanged is not None:
        unchanged = unchanged & ~removals[:, None]
    return replace(
        batch,
        ops=ops,
        old_kind=old_kind,
        columns=[without(column) for column in batch.columns],
        unchanged=unchanged,
        unrepresentable={i: without(texts) for i, texts in batch.unrepresentable.items()},
    )
