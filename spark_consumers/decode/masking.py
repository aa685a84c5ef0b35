"""Masked columns: what is left of a value before anything else sees it. Pure.

A column is masked where its text is first read, from the log (`entries`) and in a copy (`sources.snapshot`): by a hash (HMAC-SHA256 of
PostgreSQL's text, in hexadecimal digits), by a constant, or by leaving it out. So whatever comes behind that, folds, data files and
their statistics, the row index, quarantined rows and errors, has the masked value only; and a live read, which folds as an epoch does,
has the same.

Why rows stay what they were: a hash is a function of the text, and two texts have the same hash with a probability of 2**-256. So a
hashed key is a key, and a changed one is a change of key; hashed rows of a table without a key are equal where the rows are. A column
that is left out, or has one value, says nothing about a row, so it may not be of the key. A value that was not sent (unchanged TOAST) is
as before, and so is its hash.

Changes that the masks do not fit (a masked column has another name) have no values at all, and the reason instead
(`ChangeBatch.unmaskable`): the table is copied again, or not, but never with what was to be masked.
"""

import hmac
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import sha256
from typing import Final

import numpy as np
import pyarrow as pa

from spark_consumers.decode.spans import of_numbers, of_texts
from spark_consumers.decode.types import TEXT, column_type, from_text
from spark_consumers.decode.unrepresentable import UnrepresentableValueError
from walsender_bridge.postgres.column_masks import CONSTANT, DROP, HASH, ColumnMask
from walsender_bridge.postgres.protocol.pgoutput import Column

#: Bytes of a key at least: a shorter one could be guessed from a hash of a known value.
SHORTEST_KEY: Final = 32
_FINGERPRINT: Final = b"tuskline: the key of masked columns"


@dataclass(frozen=True, slots=True)
class Masking:
    """A table's masks, by which `argument` of a hashed column is the key's `fingerprint`, and the key."""

    masks: tuple[ColumnMask, ...] = ()
    key: bytes = field(default=b"", repr=False)

    def of(self, column: str) -> ColumnMask | None:
        """The mask of a column; None without one."""
        return next((mask for mask in self.masks if mask.column == column), None)


NOTHING: Final = Masking()


def fingerprint(key: bytes) -> str:
    """By which a key is recognized. It says no more about the key than any hash that it makes."""
    return hmac.digest(key, _FINGERPRINT, sha256).hex()


def recorded(masks: Sequence[ColumnMask], key: bytes) -> tuple[ColumnMask, ...]:
    """The masks as a table's version has them: with the key's fingerprint."""
    return tuple(m._replace(argument=fingerprint(key)) if m.kind == HASH else m for m in masks)


def opened(masks: Sequence[ColumnMask], key: bytes) -> Masking | str:
    """The masking of a table with these recorded masks, or why there is none."""
    known = {mask.argument for mask in masks if mask.kind == HASH}
    if not known:
        return Masking(tuple(masks))
    if not key:
        return "its columns are hashed with a key that is not given here"
    if known != {fingerprint(key)}:
        return "its columns are hashed with another key"
    return Masking(tuple(masks), key)


def kept(columns: Sequence[Column], masks: Collection[ColumnMask]) -> tuple[Column, ...]:
    """A table's columns as the lake has them: without those that are left out; a hash is a text."""
    kinds = {mask.column: mask.kind for mask in masks}
    return tuple(
        replace(column, type_oid=TEXT, typmod=-1) if kinds.get(column.name) == HASH else column
        for column in columns
        if kinds.get(column.name) != DROP
    )


def misfit(
    columns: Sequence[Column], key: Collection[str], masks: Sequence[ColumnMask]
) -> str | None:
    """Why a table of these columns, which names its rows by `key`, cannot be masked so; None if it can."""
    by_name = {column.name: column for column in columns}
    for mask in masks:
        column = by_name.get(mask.column)
        if column is None:
            return f"it has no column {mask.column!r}, which is to be masked"
        if mask.kind == HASH:
            continue
        if mask.column in key:
            return f"the column {mask.column!r} of its key can only be masked by a hash"
        if mask.kind == CONSTANT:
            try:
                _constant(column, mask.argument)
            except UnrepresentableValueError as fault:
                return f"the constant for its column {mask.column!r} cannot be used: {fault.what}"
    return None


def hashed(texts: pa.Array, key: bytes) -> pa.Array:
    """The hashes of these texts (of any type of Arrow's for text or bytes), as UTF-8; NULL stays NULL."""
    # Bytes: what is hashed need not be valid UTF-8.
    raw = texts.cast(pa.large_binary()).to_pylist()
    digest = partial(hmac.digest, key, digest=sha256)
    found = [None if text is None else digest(text).hex().encode() for text in raw]
    return pa.array(found, pa.binary()).cast(pa.string())


def constant(column: Column, mask: ColumnMask, present: np.ndarray) -> pa.Array:
    """The mask's value where `present`, otherwise NULL."""
    one = _constant(column, mask.argument)
    places = np.where(present, 0, 1).astype(np.int64)
    return pa.concat_arrays([one, pa.nulls(1, one.type)]).take(of_numbers(places))


def _constant(column: Column, text: str) -> pa.Array:
    return from_text(of_texts([text]), column_type(column.type_oid, column.typmod))
