"""Finds rows by their digests: from the newest run to the oldest, those that are alive."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from spark_consumers.lake.index.digests import Digests, Int64s, UInt64s
from spark_consumers.lake.index.liveness import Liveness, UInt32s
from spark_consumers.lake.index.run_format import Records, RunReader

#: Blocks that are read together, about 4 MiB.
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Found:
    """Rows: which of the wanted digests each has, and where it is (the number of its file, as `Liveness` has it)."""

    wanted: Int64s
    files: UInt32s
    positions: UInt32s

    def __len__(self) -> int:
        return len(self.wanted)


NOTHING: Final = Found(np.zeros(0, np.int64), np.zeros(0, np.uint32), np.zeros(0, np.uint32))


def find(runs: Sequence[RunReader], liveness: Liveness, wanted: Digests, counts: Int64s) -> Found:
    """For each digest as many living rows as wanted, or all if there are fewer. No digest may come twice.

    `runs`, the oldest first, are all that `liveness` knows. Of equal rows the newest are found first. Raises
    `IndexDamagedError`, `CorruptError`.
    """
    order = wanted.order()
    wanted, left = wanted.take(order), counts[order]
    parts: list[Found] = []
    for run in reversed(runs):
        numbers = liveness.numbers(run.tables.files)
        sought = np.flatnonzero(left > 0)
        if not len(sought):
            break
        for records in _near(run, wanted.take(sought)):
            near = _within(wanted.high, records["high"])
            open_ = near.start + np.flatnonzero(left[near] > 0)
            record, which = _matches(records, wanted.take(open_))
            if not len(record):
                continue
            files = numbers[records["file"][record]]
            positions = records["position"][record]
            alive = liveness.alive(files, positions)
            at = open_[which[alive]]
            chosen, at = _first(at, left)
            np.subtract.at(left, at, 1)
            parts.append(
                Found(order[at], files[alive][chosen], positions[alive][chosen].astype(np.uint32))
            )
    if not parts:
        return NOTHING
    return Found(*(np.concatenate([getattr(p, n) for p in parts]) for n in Found.__slots__))


def _within(wanted: UInt64s, high: UInt64s) -> slice:
    """The wanted digests, which are in order, that are in reach of these records."""
    begin = np.searchsorted(wanted, high[0], "left")
    return slice(int(begin), int(np.searchsorted(wanted, high[-1], "right")))


def _near(run: RunReader, wanted: Digests) -> Iterator[Records]:
    """The records of the blocks that may have these digests, some blocks at a time."""
    if not run.count:
        return
    first, last = run.blocks_with(wanted.high, wanted.high)
    there = last >= 0
    edges = np.zeros(len(run.fences) + 1, np.int64)
    np.add.at(edges, first[there], 1)
    np.add.at(edges, last[there] + 1, -1)
    needed = np.flatnonzero(np.cumsum(edges[:-1]) > 0)
    for start in range(0, len(needed), _AT_ONCE):
        some = needed[start : start + _AT_ONCE]
        stretches = np.split(some, np.flatnonzero(np.diff(some) > 1) + 1)
        yield np.concatenate([run.blocks(int(s[0]), int(s[-1])) for s in stretches])


def _matches(records: Records, wanted: Digests) -> tuple[Int64s, Int64s]:
    """Records and wanted digests (which are in order) that are equal, in the order of the records."""
    high, low = records["high"], records["low"]
    if not len(wanted):
        nothing = np.zeros(0, np.int64)
        return nothing, nothing
    # Of the records, those in reach of the wanted ones.
    begin = int(np.searchsorted(high, wanted.high[0], "left"))
    end = int(np.searchsorted(high, wanted.high[-1], "right"))
    high, low = high[begin:end], low[begin:end]
    place = np.searchsorted(wanted.high, high, "left")
    found: list[tuple[Int64s, Int64s]] = []
    for step in range(_most_alike(wanted.high)):
        at = place + step
        inside = at < len(wanted)
        at = np.where(inside, at, 0)
        equal = inside & (wanted.high[at] == high) & (wanted.low[at] == low)
        rows = np.flatnonzero(equal)
        found.append((rows + begin, at[rows]))
    if len(found) == 1:
        return found[0]
    rows = np.concatenate([r for r, _ in found])
    order = np.argsort(rows, kind="stable")
    return rows[order], np.concatenate([w for _, w in found])[order]


def _most_alike(high: npt.NDArray[np.uint64]) -> int:
    """How many of these sorted halves are equal, at most."""
    edges = np.flatnonzero(np.concatenate([[True], high[1:] != high[:-1], [True]]))
    return int(np.diff(edges).max(initial=0))


def _first(at: Int64s, left: Int64s) -> tuple[Int64s, Int64s]:
    """Of the candidates for each place, the first so many as are left to find: their indexes, and their places."""
    order = np.argsort(at, kind="stable")
    places = at[order]
    edges = np.flatnonzero(np.concatenate([[True], places[1:] != places[:-1]]))
    sizes = np.diff(np.concatenate([edges, [len(places)]]))
    rank = np.arange(len(places)) - np.repeat(edges, sizes)
    chosen = order[rank < left[places]]
    return chosen, at[chosen]
