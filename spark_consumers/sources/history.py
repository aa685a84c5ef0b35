"""Whether a log still has the history that a position in it was taken from. Pure, but for `around`.

The log's disk may be restored from a snapshot, together with PostgreSQL's: then the log ends before positions that
readers have, continues with other transactions, and passes these positions again. Its identity does not change. For a
position of version V at an offset, these conditions distinguish the two histories:

    versions     ... <= V |  > V ...
    commits     --+-------+-------+--
                  before  ^ first
                       offset

- the log's version is V or greater, and the stream reaches the offset;
- a commit ends exactly at the offset, and its last transaction has the LSN and the commit time that were recorded with
  the position: two histories that have parted do not have a transaction of one end LSN and one microsecond;
- the first commit after it has a version greater than V.

Commits are immutable, so a position that matches once matches until the log is restored again.

A stream whose source was reattached begins another history at `history_start` (`change_log.restart`), under offsets
that were never used: positions below it have no continuation, whatever else matches.
"""

from dataclasses import dataclass
from typing import NamedTuple

from walsender_bridge.change_log.client import CutPoint, LogStatus, StreamCut
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn


class TransactionEnd(NamedTuple):
    """A transaction's end LSN and commit time (microseconds since 1970)."""

    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class HistoryMark:
    """A position in a stream: its exclusive end offset, and the last transaction before it.

    `end`: that transaction's end; None in positions of earlier formats.
    """

    offset: int
    end: TransactionEnd | None = None


@dataclass(frozen=True, slots=True)
class Around:
    """The commits around a position, as far as the log has them: the one that ends there, and the one after it."""

    before: CutPoint | None
    first: CutPoint | None


def around(reader: StreamReader, mark: HistoryMark, cut: StreamCut, version: int) -> Around | None:
    """The commits around the position; None where `differs` needs none, or the log was trimmed beyond it."""
    if not max(cut.low_offset, 1) <= mark.offset < cut.end_offset:
        return None
    behind = reader.plan(mark.offset, version, max_versions=1)
    if not behind:
        return Around(None, None)
    return Around(reader.cut_before(behind[0].version), behind[0])


def was_reattached(mark: HistoryMark, cut: StreamCut | None) -> bool:
    """Whether the stream has begun another history since the position was taken."""
    return cut is not None and mark.offset < cut.history_start


def differs(
    version: int, mark: HistoryMark, status: LogStatus, stream: str, found: Around | None
) -> str | None:
    """Why the log, at `status`, is not the one that the position of this version was taken from; None if it may be."""
    cut = status.streams.get(stream)
    if status.version < version:
        return f"it is at version {status.version}, but version {version} was read from it"
    if cut is None:
        return f"it has no stream {stream}"
    if was_reattached(mark, cut):
        return (
            f"stream {stream} begins another history at offset {cut.history_start}, since its source was reattached, and "
            f"was read up to {mark.offset}"
        )
    if mark.offset > cut.end_offset:
        return f"stream {stream} ends at offset {cut.end_offset}, but was read up to {mark.offset}"
    if mark.offset == cut.end_offset:
        return _other(stream, mark, TransactionEnd(cut.last_end_lsn, cut.last_commit_time))
    if found is None:
        return None
    if found.first is None:
        return f"stream {stream} has no commit after offset {mark.offset}"
    if found.first.version <= version:
        return (
            f"version {found.first.version} of stream {stream} ends at offset "
            f"{found.first.end_offset}, but at version {version} it ended at {mark.offset}"
        )
    if found.before is None:
        # The first commit of the stream, or the log was trimmed up to here.
        return None
    if found.before.end_offset != mark.offset:
        return f"no commit of stream {stream} ends at offset {mark.offset}, where one ended"
    end = TransactionEnd(found.before.last_end_lsn, found.before.last_commit_time)
    return _other(stream, mark, end)


def _other(stream: str, mark: HistoryMark, end: TransactionEnd) -> str | None:
    if mark.end is None or mark.end == end:
        return None
    return (
        f"another transaction of stream {stream} ends at offset {mark.offset}: it ends at "
        f"{format_lsn(end.end_lsn)}; the one that was read ended at {format_lsn(mark.end.end_lsn)}"
    )
