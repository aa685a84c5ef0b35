"""`tuskline log tail`: committed transactions of a stream as they are read, and how they are shown."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from walsender_bridge.change_log.client import LogClient, LogEntry, ReplicaClient, StreamCut
from walsender_bridge.change_log.transactions import (
    OPERATIONS,
    LoggedRow,
    LoggedTransaction,
    Restart,
    TransactionReader,
)
from walsender_bridge.errors import UnavailableError, UnknownStreamError, UsageError
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.postgres.protocol.pgoutput import Relation
from walsender_bridge.postgres.protocol.pgoutput_rows import Unchanged, Value
from walsender_bridge.runtime.times import iso_time_of_microseconds

#: Seconds between two looks for new commits, and after an error.
_POLL: Final = 0.2
_RETRY: Final = 1.0

Logged = LoggedRow | LoggedTransaction | Restart


@dataclass(frozen=True, slots=True)
class TailOptions:
    """`from_version`: the first one; None: the first that is retained, or with `follow` the next. `seconds`: None: no end."""

    stream: str
    from_version: int | None = None
    follow: bool = False
    seconds: float | None = None
    relations: frozenset[str] | None = None
    rows: bool = False


def tail(address: str, options: TailOptions, note: Callable[[str], None]) -> Iterator[Logged]:
    """What is committed, in order. With `follow`, a log that does not answer is waited for, and `note` is told once.

    Raises `UnknownStreamError`, `UsageError` for a version that was never issued, `TrimmedError`, `UnavailableError`.
    """
    deadline = None if options.seconds is None else time.monotonic() + options.seconds
    follower = _Follower(options, note)
    away = False
    while True:
        try:
            with LogClient(address) as log:
                for each in follower.news(log, deadline):
                    away = False
                    yield each
        except UnavailableError as error:
            if not options.follow or follower.offset is None:
                raise
            if not away:
                note(f"waiting for the log: {error}")
            away = True
        left = _RETRY if deadline is None else deadline - time.monotonic()
        if not options.follow or left <= 0:
            return
        time.sleep(min(_RETRY, left))


class _Follower:
    """Where the reading of a stream is. `offset`: the next entry; None: not known yet."""

    def __init__(self, options: TailOptions, note: Callable[[str], None]) -> None:
        self.offset: int | None = None
        self._options = options
        self._note = note
        self._reader: TransactionReader | None = None
        self._replica: ReplicaClient | None = None

    def news(self, log: LogClient, deadline: float | None) -> Iterator[Logged]:
        """What is committed, until the deadline; without `follow` what is committed now."""
        while True:
            cut = self._cut(log)
            with ReplicaClient(cut.addresses[0]) as self._replica:
                self.offset = self._start(log, cut, self._replica)
                for entry in self._entries(self._replica, self.offset, cut.end_offset):
                    yield from self._read(entry)
                    if _is_past(deadline):
                        return
            if not self._options.follow:
                return
            while self._cut(log).end_offset <= self.offset:
                if _is_past(deadline):
                    return
                time.sleep(_POLL)

    def _entries(self, replica: ReplicaClient, start: int, end: int) -> Iterator[LogEntry]:
        if start < end:
            yield from replica.read(self._options.stream, start, end)

    def _cut(self, log: LogClient) -> StreamCut:
        streams = log.status().streams
        stream = self._options.stream
        if stream not in streams:
            raise UnknownStreamError(
                f"stream {stream!r:.60} does not exist in this log",
                repair=f"existing streams: {', '.join(sorted(streams)) or 'none'}",
            )
        return streams[stream]

    def _start(self, log: LogClient, cut: StreamCut, replica: ReplicaClient) -> int:
        if self.offset is not None:
            return self.offset
        version = self._options.from_version
        if version is None:
            return cut.end_offset if self._options.follow else self._low(replica)
        newest = log.status().version
        if version > newest and not self._options.follow:
            raise UsageError(
                f"version {version} was not published yet; the newest is {newest}",
                repair="add --follow to wait for it",
            )
        before = replica.cut_before(self._options.stream, version)
        if before is None:
            low = self._low(replica)
            if low > 1:
                self._note(f"the entries below offset {low} have been trimmed")
            return low
        # With a version to come, what is not published yet is not skipped.
        return min(max(before.end_offset, cut.low_offset), cut.end_offset)

    def _low(self, replica: ReplicaClient) -> int:
        """The first entry that is retained; the repository knows of a trim only with the next report."""
        return replica.stream_status(self._options.stream).low_offset

    def _read(self, entry: LogEntry) -> Iterator[Logged]:
        if self._reader is None:
            self._reader = TransactionReader(
                self._schemas, relations=self._options.relations, rows=self._options.rows
            )
        yield from self._reader.read(entry.offset, entry.version, entry.data)
        self.offset = entry.offset + 1

    def _schemas(self, digests: Any) -> dict[bytes, bytes]:
        assert self._replica is not None, "an entry is being read"
        return self._replica.schemas(self._options.stream, digests)


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() > deadline


# -- what is shown ----------------------------------------------------------------------------------


def record(each: Logged) -> dict[str, Any]:
    """One line of JSON."""
    if isinstance(each, Restart):
        return {"kind": "restart", "version": each.version, "offset": each.offset}
    if isinstance(each, LoggedTransaction):
        return {
            "kind": "transaction",
            "version": each.version,
            "offset": each.offset,
            "xid": each.xid,
            "end_lsn": format_lsn(each.end_lsn),
            "commit_time": iso_time_of_microseconds(each.commit_time),
            "timeline": each.timeline,
            "counts": each.counts,
        }
    change, relation = each.change, each.relation
    shown = {
        "kind": "row",
        "xid": each.xid,
        "relation": relation.full_name,
        "operation": OPERATIONS[change.kind],
    }
    for name, values in (("key" if change.key else "old", change.old), ("new", change.new)):
        if values is not None:
            shown[name] = _named(relation, values, only_key=name == "key")
    unchanged = [c.name for c, v in _pairs(relation, change.new or ()) if v is Unchanged.VALUE]
    return {**shown, "unchanged": unchanged} if unchanged else shown


def _pairs(relation: Relation, values: tuple[Value, ...]) -> list[tuple[Any, Value]]:
    return list(zip(relation.columns, values, strict=False))


def _named(
    relation: Relation, values: tuple[Value, ...], *, only_key: bool
) -> dict[str, str | None]:
    return {
        column.name: _text(value)
        for column, value in _pairs(relation, values)
        if not isinstance(value, Unchanged) and (column.is_key or not only_key)
    }


def _text(value: bytes | bytearray | None) -> str | None:
    if value is None:
        return None
    if isinstance(value, bytearray):
        return "\\x" + value.hex()
    return value.decode("utf-8", "backslashreplace")


def line(each: Logged) -> str:
    """One line of text, for `Output.line`, which escapes control characters in names and values."""
    shown = record(each)
    if isinstance(each, Restart):
        text = f"version {each.version}  restart at offset {each.offset}: another history begins"
    elif isinstance(each, LoggedTransaction):
        changes = "; ".join(f"{name}: {_counts(counts)}" for name, counts in each.counts.items())
        text = (
            f"version {each.version}  xid {each.xid}  {shown['end_lsn']}  {shown['commit_time']}"
            f"  {changes or 'no changes'}"
        )
    else:
        parts = [
            f"{name}: {_quoted(shown[name])}" for name in ("key", "old", "new") if name in shown
        ]
        parts += [f"unchanged: {', '.join(shown['unchanged'])}"] if "unchanged" in shown else []
        text = f"  {shown['relation']} {shown['operation']}  {'  '.join(parts)}"
    return text


def _counts(counts: Any) -> str:
    return ", ".join(f"{number} {operation}" for operation, number in counts.items())


def _quoted(values: dict[str, str | None]) -> str:
    """`column='value'`, with quotes as SQL doubles them, so that a value cannot end itself."""
    return " ".join(
        f"{name}=NULL" if value is None else "{}='{}'".format(name, value.replace("'", "''"))
        for name, value in values.items()
    )
