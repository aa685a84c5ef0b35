"""What becomes of the tables of a stream when the log no longer has the history that the lake was written from. Pure.

That the log was rolled back is found by `history.differs`, at the cut that the newest link has of each stream. Such
a stream is *apart* from the lake:

- its tables stop, with the reason; what was copied and not shown is dropped. The cut stays as it is: should the right
  log come back, it fits again, and `table resume` lets a table go on;
- nothing of the stream is planned or copied while it is apart;
- when every table that is to follow was asked to be copied again, the lake gives the old history up: the cut becomes
  the log's own, and no table goes on from an offset of the old one. A paused table is copied again when it is resumed.

A copy that is not shown yet may be ahead of the lake's cut, so it has its own mark: if the log has lost that
position, the copy is dropped, and the table is copied again.

A stream whose source was reattached (`history.was_reattached`) is apart as well, but the operator has already decided: all
its tables are copied again automatically, and the lake takes the log's cut at once. Copies that were under way are
dropped, as they may end before the new slot begins.

An epoch never goes back, so the log first skips the versions that the lake has used (`LogClient.raise_version`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from spark_consumers.lake.epoch.plan import position_of
from spark_consumers.lake.manifest.chain import Manifest, StreamPosition, TableVersion
from spark_consumers.lake.manifest.table_version import LEFT, LIVE, PAUSED, REATTACHED, RESUMING
from spark_consumers.lake.tables import states
from spark_consumers.lake.tables.states import stream_of
from spark_consumers.sources.history import (
    Around,
    HistoryMark,
    TransactionEnd,
    differs,
    was_reattached,
)
from walsender_bridge.change_log.client import LogStatus
from walsender_bridge.errors import DivergedError

REASON = "the log was rolled back: "
WAYS_OUT = (
    "tuskline table resync of every table of its stream copies them again; or restore the log that the lake"
    " was written from, and repeat the request"
)


def mark_of(position: StreamPosition) -> HistoryMark:
    """The lake's cut of a stream."""
    return HistoryMark(position.offset, TransactionEnd(position.lsn, position.commit_time))


def why_apart(
    head: Manifest, status: LogStatus, stream: str, found: Around | None = None
) -> str | None:
    """Why the stream is apart from the lake, which has a cut of it; None: it is not, as far as `found` shows."""
    mark = mark_of(head.streams[stream])
    if was_reattached(mark, status.streams.get(stream)):
        return REATTACHED
    why = differs(head.epoch, mark, status, stream, found)
    return why and REASON + why


def marked(copy: TableVersion, status: LogStatus, stream: str) -> TableVersion:
    """The copy, with where the log is when it is taken on: its rows may be ahead of the lake's cut."""
    cut = status.streams.get(stream)
    if cut is None:
        return copy
    mark = (status.version, cut.end_offset, cut.last_end_lsn, cut.last_commit_time)
    return replace(copy, mark=mark)


def mark_of_copy(copy: TableVersion) -> tuple[int, HistoryMark] | None:
    """The version and the place of the log that the copy was taken on at."""
    if len(copy.mark) != 4:
        return None
    version, offset, lsn, commit_time = copy.mark
    return version, HistoryMark(offset, TransactionEnd(lsn, commit_time))


def hold(head: Manifest, apart: Mapping[str, str], *, holds: bool) -> Manifest:
    """The head with the tables of these streams (stream -> why it is apart) stopped; see `states.stop`."""
    for name, table in head.tables.items():
        stream = stream_of(name)
        if stream not in apart or table.state in {PAUSED, LEFT}:
            continue
        asked, decided = bool(table.resync), apart[stream] == REATTACHED
        known = asked or (table.reason.startswith(REASON) and not decided)
        if table.state in {LIVE, RESUMING} or not known:
            # The reason stays the first one: what is found later only differs in its figures.
            reason = table.resync or apart[stream]
            head = states.stop(head, name, reason, holds=holds, full_resync=asked or decided)
    copies = {name: copy for name, copy in head.copies.items() if stream_of(name) not in apart}
    return replace(head, copies=copies)


def unasked(head: Manifest, stream: str) -> list[str]:
    """The tables of the stream that are to follow, and that no operator has requested to be copied again."""
    return sorted(
        name
        for name, table in head.tables.items()
        if stream_of(name) == stream and table.state not in {PAUSED, LEFT} and not table.resync
    )


def given_up(head: Manifest, apart: Mapping[str, str]) -> list[str]:
    """The streams that are apart, and whose old history is needed by no table any more.

    Paused tables follow the others, but if all are paused the operator has not decided, unless the source was
    reattached.
    """
    return [
        stream
        for stream, why in apart.items()
        if not unasked(head, stream) and (why == REATTACHED or not _is_undecided(head, stream))
    ]


def _is_undecided(head: Manifest, stream: str) -> bool:
    kept = [t for n, t in head.tables.items() if stream_of(n) == stream and t.state != LEFT]
    return bool(kept) and not any(table.resync for table in kept)


def begin_again(head: Manifest, apart: Mapping[str, str], status: LogStatus) -> Manifest:
    """The head with the streams that were given up at the log's own cut, once its version has come past the epoch."""
    if status.version < head.epoch:
        return head
    streams, tables = dict(head.streams), dict(head.tables)
    for stream in given_up(head, apart):
        if (cut := status.streams.get(stream)) is None:
            continue
        streams[stream] = position_of(cut)
        for name, table in head.tables.items():
            if stream_of(name) == stream and table.state != LEFT:
                tables[name] = replace(table, resync=table.resync or apart[stream])
    return replace(head, streams=streams, tables=tables)


def without(status: LogStatus, apart: Iterable[str]) -> LogStatus:
    """The log as far as the lake may follow it."""
    gone = set(apart)
    return replace(status, streams={s: cut for s, cut in status.streams.items() if s not in gone})


def check(head: Manifest, apart: Mapping[str, str], where: str) -> None:
    """Raise `DivergedError` while tables of these streams wait for the operator to decide."""
    for stream, why in apart.items():
        if names := unasked(head, stream):
            raise DivergedError(
                f"{why}; the lake's history of {stream} differs from the log's",
                where=where,
                repair=f"tuskline table resync {' '.join(names)} copies them again; or restore the log "
                "that the lake was written from, and resume them (tuskline table resume)",
            )
