"""How a large table is divided by ranges of a column, so that it can be read from several snapshots. Pure.

The column has integers, or UUIDs, of which the first eight bytes count here: as a number whose order is that of PostgreSQL
(`ordinal_of`). All that begin with the same eight bytes are in one range.

A *sample* has of some blocks of a relation, in their order, the least key in each. It says how many bytes lie between two
keys, and whether rows of neighbouring keys are in neighbouring blocks: if not, each range would read most of the
table's blocks by its index, and the table is read as a whole instead.

Nothing depends on the sample but sizes: the ranges of a chunk have each key of it, whatever was sampled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final
from uuid import UUID

import numpy as np
import numpy.typing as npt
from psycopg import sql

from walsender_bridge.runtime.sql import load

#: Sampled blocks for each piece that is read at once, and of a table at most.
BLOCKS_A_PIECE: Final = 8
MOST_BLOCKS: Final = 50_000
#: From which rank correlation of keys and blocks on a range of keys is read by the index.
_CORRELATION: Final = 0.9
#: A last chunk may be larger by so much.
_LAST: Final = 1.5

Int64s = npt.NDArray[np.int64]
#: What lies between the first eight bytes of a UUID, which have no sign, and an `int8`.
_SIGN: Final = 2**63


def ordinal_of(uuid: str) -> int:
    """The number of a UUID, in PostgreSQL's text: its first eight bytes, less 2**63."""
    return int(uuid.replace("-", "")[:16], 16) - _SIGN


def least_uuid(ordinal: int) -> str:
    """The least UUID of this number."""
    return str(UUID(int=(ordinal + _SIGN) << 64))


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Rows of one relation whose `column` is at least `begin` and less than `end` (None: without a limit).

    `is_uuid`: these are numbers of UUIDs.
    """

    relation: tuple[str, str]
    oid: int
    column: str
    begin: int | None
    end: int | None
    is_uuid: bool = False

    @property
    def settings(self) -> str:
        """For the transaction that reads it."""
        return load("snapshot/by_index")

    @property
    def bounds(self) -> list[sql.Composed]:
        """The conditions of its rows."""
        found = []
        for operator, value in ((">=", self.begin), ("<", self.end)):
            if value is not None:
                bound = sql.SQL("{}::uuid" if self.is_uuid else "{}").format(
                    sql.Literal(least_uuid(value) if self.is_uuid else value)
                )
                found.append(
                    sql.SQL("{} " + operator + " {}").format(sql.Identifier(self.column), bound)
                )
        return found

    def __str__(self) -> str:
        return f"{self.column} from {'its least value' if self.begin is None else self.begin} on"


@dataclass(frozen=True, slots=True)
class Sample:
    """Of a relation of so many bytes: the least keys in some of its blocks, in the order of the blocks."""

    relation: tuple[str, str]
    oid: int
    size: int
    keys: Int64s


def percent(blocks: int, size: int, piece: int) -> float:
    """Which part of a relation's blocks is sampled. `size`, `piece`: bytes of the relation, and of a piece."""
    wanted = min(max(BLOCKS_A_PIECE * (size // piece + 1), 100), MOST_BLOCKS)
    return min(100.0, 100.0 * wanted / max(blocks, 1))


def is_clustered(samples: Sequence[Sample], piece: int) -> bool:
    """Whether rows of neighbouring keys are in neighbouring blocks, in each relation of more bytes than a piece."""
    return all(
        abs(_rank_correlation(sample.keys)) >= _CORRELATION
        for sample in samples
        if sample.size > piece
    )


def most_of_one_key(samples: Sequence[Sample]) -> float:
    """About how many bytes the rows of one key have, at most: no range divides them."""
    keys, weights = _weighed(samples)
    if not len(keys):
        return 0.0
    _, numbers = np.unique(keys, return_inverse=True)
    return float(np.bincount(numbers, weights).max())


def _weighed(samples: Sequence[Sample]) -> tuple[Int64s, npt.NDArray[np.float64]]:
    """The keys of all samples, and how many bytes each of them stands for."""
    keys = np.concatenate([sample.keys for sample in samples])
    weights = np.concatenate([np.full(len(s.keys), s.size / max(len(s.keys), 1)) for s in samples])
    return keys, weights


def _rank_correlation(keys: Int64s) -> float:
    """Of the keys and their places, between -1 and 1; 0 for too few keys."""
    if len(keys) < 3:
        return 0.0
    ranks = np.argsort(np.argsort(keys, kind="stable"), kind="stable")
    return float(np.corrcoef(ranks, np.arange(len(keys)))[0, 1])


def chunk_end(samples: Sequence[Sample], begin: int | None, size: int) -> int | None:
    """Where the chunk of about `size` bytes ends that begins at `begin`; None: it has all that is left."""
    keys, weights = _weighed(samples)
    left = keys >= begin if begin is not None else np.ones(len(keys), np.bool_)
    order = np.argsort(keys[left], kind="stable")
    keys, before = keys[left][order], np.cumsum(weights[left][order])
    if not len(keys) or before[-1] <= _LAST * size:
        return None
    end = int(keys[np.searchsorted(before, size)])
    # Many blocks may begin with one key; a chunk has at least one.
    after = keys[keys > (keys[0] if begin is None else begin)]
    return end if begin is None or end > begin else int(after[0]) if len(after) else None


def pieces(
    samples: Sequence[Sample],
    column: str,
    begin: int | None,
    end: int | None,
    size: int,
    *,
    is_uuid: bool = False,
) -> Iterator[KeyRange]:
    """The chunk from `begin` to `end` in ranges of about `size` bytes, of each relation."""
    for sample in samples:
        count = min(max(1, round(sample.size / size)), max(1, len(sample.keys)))
        cuts = np.unique(np.sort(sample.keys)[np.arange(1, count) * len(sample.keys) // count])
        within = [
            cut
            for cut in cuts.tolist()
            if (begin is None or cut > begin) and (end is None or cut < end)
        ]
        for first, last in pairwise([begin, *within, end]):
            yield KeyRange(sample.relation, sample.oid, column, first, last, is_uuid)
