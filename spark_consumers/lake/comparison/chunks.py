"""Which rows of a table are compared together. Pure.

A table whose key begins with an integer or a UUID that an index finds is compared in *ranges* of that column: each costs the source
only its own rows, and may be compared at a cut of its own, so no snapshot is needed for longer than some of them take. Every key is in
exactly one range, whatever the sample was that the ranges are made from.

Any other table is divided by a hash into *buckets*: by that of the key, or without a key, of the row. Neither the order of keys, which is a
collation's, nor where rows are has to be the same on both sides. The source's rows are read once, for all buckets, so all are
compared at one cut, and the snapshot is needed for as long as that takes.
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from psycopg import sql

from spark_consumers.decode.spans import Int64s
from spark_consumers.lake.tables.chunks import numbers_of
from spark_consumers.snapshot.key_ranges import KeyRange, Sample, ordinal_of

#: Buckets of a table at most: what is known of a digest's first two bytes.
MOST_BUCKETS: Final = 2**16


@dataclass(frozen=True, slots=True)
class Chunks:
    """How a table is divided into chunks, which are numbered from 0.

    `column`: ranges of this one, which the `bounds` divide (`key_ranges.ordinal_of`, if it `is_uuid`); empty: into so many `buckets`, a power of two.
    """

    column: str = ""
    bounds: tuple[int, ...] = ()
    is_uuid: bool = False
    buckets: int = 1

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.bounds) + 1 if self.column else self.buckets

    def limits(self, number: int) -> tuple[int | None, int | None]:
        """The least key of a range, and the first behind it; None: without a limit."""
        begin = self.bounds[number - 1] if number else None
        return begin, self.bounds[number] if number < len(self.bounds) else None

    def ranges(self, number: int, relations: Sequence[tuple[str, str, int]]) -> list[KeyRange]:
        """A range in each of these relations (schema, name, OID)."""
        begin, end = self.limits(number)
        return [
            KeyRange((schema, name), oid, self.column, begin, end, self.is_uuid)
            for schema, name, oid in relations
        ]

    def sql_number(self, key_digest: str) -> sql.Composable:
        """The bucket of a row, from this column of digests."""
        if self.column:
            return sql.SQL("0")
        digest = sql.Identifier(key_digest)
        return sql.SQL("(((get_byte({0}, 0) << 8) | get_byte({0}, 1)) & {1})").format(
            digest, sql.Literal(self.buckets - 1)
        )

    def of_keys(self, keys: pa.Array) -> Int64s:
        """The range of each key, of the first column of the key."""
        return np.searchsorted(np.array(self.bounds, np.int64), numbers_of(keys), side="right")

    def of_form(self, form: str) -> int:
        """The range of a key, by the form of its first column."""
        return bisect_right(self.bounds, ordinal_of(form) if self.is_uuid else int(form))

    def of_digests(self, digested: bytes) -> Int64s:
        """The bucket of each row, from the digests that divide the table."""
        first = np.frombuffer(digested, np.uint8).reshape(-1, 16)[:, :2].astype(np.int64)
        found: Int64s = ((first[:, 0] << 8) | first[:, 1]) & (self.buckets - 1)
        return found


def ranges_of(samples: Sequence[Sample], column: str, size: int, *, is_uuid: bool) -> Chunks:
    """Ranges of about `size` bytes each, by these samples."""
    keys = np.concatenate([each.keys for each in samples] or [np.zeros(0, np.int64)])
    weights = np.concatenate(
        [np.full(len(s.keys), s.size / max(1, len(s.keys))) for s in samples] or [np.zeros(0)]
    )
    order = np.argsort(keys, kind="stable")
    keys, before = keys[order], np.cumsum(weights[order])
    whole = float(before[-1]) if len(before) else 0.0
    cuts = np.arange(size, whole - size / 2, size)
    bounds = np.unique(keys[np.searchsorted(before, cuts)]) if len(cuts) else keys[:0]
    return Chunks(column, tuple(bounds.tolist()), is_uuid)


def buckets_of(total: int, size: int) -> Chunks:
    """So many buckets that each has about `size` of `total` bytes."""
    wanted = max(1, -(-total // size))
    return Chunks(buckets=min(MOST_BUCKETS, 1 << (wanted - 1).bit_length()))


def sampled(count: int, fraction: float, seed: str) -> tuple[int, ...]:
    """The numbers of a random part of `count` chunks, at least one; the same for the same seed."""
    if fraction >= 1:
        return tuple(range(count))
    wanted = min(count, max(1, round(count * fraction)))
    # Not for secrets: the seed is printed.
    return tuple(sorted(random.Random(seed).sample(range(count), wanted)))
