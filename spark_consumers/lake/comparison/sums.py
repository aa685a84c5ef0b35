"""Sums of digests, and the rows that make them differ. Pure.

A row's digest is the first half of the SHA-256 of its joined forms (`forms`). A chunk's sum has how many rows there are, and the sums
of both halves of their digests, modulo 2**64: it does not depend on the rows' order, counts equal rows, and sums of
parts add up. Two chunks with equal sums have the same rows, but for a chance of 2**-128; nobody gains by looking for a collision, as
who can write such rows to the source can write any rows.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from spark_consumers.decode.spans import Int64s

_MODULUS: Final = 2**64
#: Bytes of a digest.
DIGEST: Final = 16

#: A key (its columns' forms, none in a table without one), and a row's digest.
KeyAndDigest = tuple[tuple[str, ...], bytes]


class Sums(NamedTuple):
    """Of some rows. `beyond`: rows of the source with a value that the lake's type lacks, which are in no sum."""

    rows: int = 0
    first: int = 0
    second: int = 0
    beyond: int = 0

    def plus(self, other: "Sums") -> "Sums":
        """Of the rows of both."""
        return Sums(
            self.rows + other.rows,
            (self.first + other.first) % _MODULUS,
            (self.second + other.second) % _MODULUS,
            self.beyond + other.beyond,
        )

    def equals(self, lake: "Sums") -> bool:
        """Whether the lake has these rows of the source, but for those that are `beyond`."""
        return self[:3] == lake[:3]


def digests(texts: pa.Array) -> bytes:
    """The digests of texts (`large_string`, none NULL), end to end."""
    if not len(texts):
        return b""
    _, offsets, data = texts.buffers()
    ends = np.frombuffer(offsets, np.int64, len(texts) + 1, texts.offset * 8).tolist()
    view = memoryview(data if data is not None else b"")
    sha = hashlib.sha256
    return b"".join([sha(view[a:b]).digest()[:DIGEST] for a, b in pairwise(ends)])


def split(digested: bytes) -> list[bytes]:
    """Digests that are end to end, one by one."""
    return [digested[at : at + DIGEST] for at in range(0, len(digested), DIGEST)]


def halves(digested: bytes) -> Int64s:
    """The halves of digests as numbers; shape: (rows, 2)."""
    return np.frombuffer(digested, ">i8").reshape(-1, 2).astype(np.int64)


def added(parts: Iterable[tuple[int, Sums]]) -> dict[int, Sums]:
    """The sums of several parts, by chunk."""
    found: dict[int, Sums] = {}
    for chunk, part in parts:
        found[chunk] = found.get(chunk, Sums()).plus(part)
    return found


#: The row is only at the source; only in the lake; in both, with other values; in both, another number of times.
MISSING, EXTRA, CHANGED, COUNT = "missing", "extra", "changed", "count"


@dataclass(frozen=True, slots=True)
class RowDifference:
    """A key whose rows differ. `source`, `lake`: the digests of its rows there, with how many of each."""

    kind: str
    key: tuple[str, ...]
    source: tuple[tuple[bytes, int], ...]
    lake: tuple[tuple[bytes, int], ...]


def differing(
    source: Mapping[KeyAndDigest, int], lake: Mapping[KeyAndDigest, int]
) -> list[RowDifference]:
    """The keys whose rows differ, ordered. In a table without a key, each digest is a key of its own."""
    ours, theirs = _by_key(source), _by_key(lake)
    found = []
    for key in sorted(ours.keys() | theirs.keys()):
        here, there = ours.get(key, Counter()), theirs.get(key, Counter())
        if here == there:
            continue
        if not there:
            kind = MISSING
        elif not here:
            kind = EXTRA
        else:
            kind = CHANGED if here.total() == there.total() else COUNT
        found.append(
            RowDifference(kind, key[0], tuple(sorted(here.items())), tuple(sorted(there.items())))
        )
    return found


def _by_key(
    rows: Mapping[KeyAndDigest, int],
) -> dict[tuple[tuple[str, ...], bytes], Counter[bytes]]:
    found: dict[tuple[tuple[str, ...], bytes], Counter[bytes]] = {}
    for (key, digest), count in rows.items():
        found.setdefault((key, b"" if key else digest), Counter())[digest] += count
    return found
