"""A change log of any size that has no bytes: for each entry its size, and where transactions begin and commits end.

It answers the planner of epochs as log servers do, by the same functions where these decide something. Nothing is read of it but
metadata, so 100 GB take a few megabytes here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from tests.support import pgoutput_messages as pm
from walsender_bridge.change_log.client import CutPoint, EntryBatch, LogEntry, LogStatus, StreamCut
from walsender_bridge.change_log.entry import build_entry
from walsender_bridge.change_log.protocol import READ_BATCH_BYTES, CommitContext, Position
from walsender_bridge.change_log.replica.cuts import cut_point, planned
from walsender_bridge.change_log.replica.disk import IndexRow

Int64s = npt.NDArray[np.int64]
START_TIME = 1_704_067_200
_HASH = bytes(16)


@dataclass(frozen=True)
class HugeStream:
    """One stream. `sizes`: of its entries, from offset 1 on, in bytes; `ends`: where each commit ends, exclusive.

    `begins`: the offsets of entries in which a transaction begins that they do not end; its xid is the offset. `times`: of
    commits, in seconds since the Unix epoch. A commit's version is its number, from 1, times `step` (versions between are of other
    streams), and its LSN is as many bytes as the stream has up to there.
    """

    name: str
    sizes: Int64s
    ends: Int64s
    times: Int64s
    begins: Int64s
    step: int = 1

    def first(self, commits: int) -> "HugeStream":
        """Only so many commits of it."""
        end = int(self.ends[commits - 1])
        begins = self.begins[self.begins < end]
        return HugeStream(
            *(self.name, self.sizes[: end - 1], self.ends[:commits], self.times[:commits]),
            *(begins, self.step),
        )

    @property
    def totals(self) -> Int64s:
        """Bytes of all entries below an offset."""
        return np.concatenate([[0, 0], np.cumsum(self.sizes)])

    def cut(self, totals: Int64s, version: int) -> StreamCut:
        """Where a version cuts it."""
        last = version // self.step - 1
        end = int(self.ends[last])
        where, size = (f"grpc://{self.name}",), int(totals[end])
        return StreamCut(
            self.name, where, end, end, size, int(self.times[last]) * 10**6, 1, 1, size
        )


class HugeLog:
    """Some streams, and readers of them (`of`, as `StreamReader`). `calls`: how often each question was asked."""

    def __init__(self, *streams: HugeStream) -> None:
        self.streams = {stream.name: stream for stream in streams}
        self.totals = {stream.name: stream.totals for stream in streams}
        self.calls: dict[str, int] = {}

    def status(self, version: int | None = None) -> LogStatus:
        """That of the whole log, or up to a version."""
        newest = max(len(s.ends) * s.step for s in self.streams.values())
        version = newest if version is None else version
        cuts = {
            name: s.cut(self.totals[name], min(version, len(s.ends) * s.step))
            for name, s in self.streams.items()
        }
        return LogStatus("log", version, 0, cuts)

    def of(self, cut: StreamCut) -> "_Reader":
        """A reader of a stream."""
        return _Reader(self, self.streams[cut.stream], self.totals[cut.stream])

    def size(self, stream: str, first: int, end: int) -> int:
        """Bytes of the entries [first, end)."""
        return int(self.totals[stream][end] - self.totals[stream][first])


class _Reader:
    def __init__(self, log: HugeLog, stream: HugeStream, totals: Int64s) -> None:
        self._log, self._stream, self._totals = log, stream, totals

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _count(self, what: str) -> None:
        self._log.calls[what] = self._log.calls.get(what, 0) + 1

    def _row(self, number: int) -> IndexRow:
        stream = self._stream
        first = int(stream.ends[number - 1]) if number else 1
        end, version = int(stream.ends[number]), (number + 1) * stream.step
        moment = int(stream.times[number]) * 10**6
        total = int(self._totals[end])
        at = Position(end, total, moment, moment, 1, total, 0)
        context = CommitContext(version, first, first, end - first)
        return IndexRow(context, total - int(self._totals[first]), at, moment)

    def _behind(self, offset: int) -> Iterator[IndexRow]:
        first = int(np.searchsorted(self._stream.ends, offset, "right"))
        return (self._row(number) for number in range(first, len(self._stream.ends)))

    def plan(
        self, after: int, up_to: int, max_bytes: int | None = None, max_versions: int | None = None
    ) -> list[CutPoint]:
        self._count("plan")
        return planned(self._behind(after), up_to, max_bytes, max_versions)

    def cut_before(self, version: int) -> CutPoint | None:
        self._count("cut_before")
        last = (version - 1) // self._stream.step - 1
        return cut_point(self._row(min(last, len(self._stream.ends) - 1))) if last >= 0 else None

    def read_batch(
        self, first: int, end: int, relations: Sequence[str] | None = None
    ) -> EntryBatch:
        """At least one entry, then as many as `READ_BATCH_BYTES`; of these come those that are of no relation."""
        assert relations == ()
        self._count("read_batch")
        reached = np.searchsorted(self._totals, self._totals[first] + READ_BATCH_BYTES, "left")
        behind = min(end, max(first + 1, int(reached)))
        begins = self._stream.begins
        low, high = np.searchsorted(begins, [first, behind], "left")
        return EntryBatch([_beginning(int(at)) for at in begins[low:high]], behind, "log")


def _beginning(offset: int) -> LogEntry:
    """An entry in which the transaction begins whose xid is the offset."""
    messages: list[Any] = [pm.begin(offset, offset), pm.insert(1, [b"1"])]
    data = build_entry(messages, timeline=1, previous_crc=0, schema_hashes={1: _HASH})
    return LogEntry(offset, 1, offset, data)
