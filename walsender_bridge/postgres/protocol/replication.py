"""The streaming replication protocol without I/O: commands to text, messages to values and back.

Sources: PostgreSQL documentation, "Streaming Replication Protocol" (commands, `XLogData`, `Primary
keepalive message`, `Standby status update`) and "Logical Streaming Replication Parameters". Commands
keep to the grammar that every server from 11 to 18 reads; names and values are always quoted, since
the replication grammar has no parameters. Times are microseconds since the Unix epoch, UTC.

A logical walsender sends one pgoutput message in one `XLogData`; it starts at `XLOG_HEADER_SIZE`.
"""

import itertools
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from walsender_bridge.errors import MalformedMessageError, UsageError
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, Lsn, WalPosition, format_lsn, parse_lsn
from walsender_bridge.postgres.protocol.pgoutput import POSTGRES_EPOCH

#: First bytes of the CopyData payloads that a walsender sends.
XLOG_DATA = ord("w")
KEEPALIVE = ord("k")
#: Bytes of `XLogData` before its data: kind, start LSN, server's end LSN, send time.
XLOG_HEADER_SIZE = 25

#: A row of a result: text, or None for NULL.
Row = tuple[str | None, ...]

_XLOG_HEADER = struct.Struct(">cQQq")
_KEEPALIVE = struct.Struct(">cQqB")
_FEEDBACK = struct.Struct(">cqIIII")
_STATUS = struct.Struct(">cQQQqB")
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}")
_HISTORY_LINE = re.compile(r"\s*(\d+)\s+([0-9A-Fa-f]+/[0-9A-Fa-f]+)(\s.*)?")


@dataclass(frozen=True, slots=True)
class XLogData:
    """The head of an `XLogData`: where its data starts, the server's end of WAL, when it was sent."""

    start_lsn: Lsn
    wal_end: Lsn
    sent_at: int


@dataclass(frozen=True, slots=True)
class Keepalive:
    """A keepalive. All transactions that commit at or before `wal_end` have been sent before it."""

    wal_end: Lsn
    sent_at: int
    reply_requested: bool


@dataclass(frozen=True, slots=True)
class SystemIdentity:
    """The result of `IDENTIFY_SYSTEM`: `flush_lsn` is the server's durable end of WAL."""

    system_id: int
    timeline: int
    flush_lsn: Lsn
    database: str


@dataclass(frozen=True, slots=True)
class ServerTimelines:
    """A server's timelines: the current one, and the switch point (exclusive end) of each ancestor."""

    timeline: int
    ancestors: tuple[WalPosition, ...] = ()

    def end_of(self, timeline: int) -> Lsn | None:
        """The LSN up to which `timeline` belongs to this history; None if no part of it does."""
        if timeline == self.timeline:
            return MAX_LSN
        return next((left.lsn for left in self.ancestors if left.timeline == timeline), None)

    def contains(self, timeline: int, lsn: Lsn) -> bool:
        """Whether the WAL of `timeline` before `lsn` is WAL of this server."""
        end = self.end_of(timeline)
        return end is not None and lsn <= end


def parse_xlog_header(data: bytes) -> XLogData:
    """The head of an `XLogData`. Raises `MalformedMessageError`."""
    if len(data) < XLOG_HEADER_SIZE or data[0] != XLOG_DATA:
        raise _fault("not an XLogData message", data)
    _, start, end, time = _XLOG_HEADER.unpack_from(data)
    return XLogData(start, end, time + POSTGRES_EPOCH)


def parse_keepalive(data: bytes) -> Keepalive:
    """A primary keepalive message. Raises `MalformedMessageError`."""
    if len(data) != _KEEPALIVE.size or data[0] != KEEPALIVE:
        raise _fault("not a keepalive message", data)
    _, end, time, reply = _KEEPALIVE.unpack(data)
    return Keepalive(end, time + POSTGRES_EPOCH, bool(reply))


def status_update(*, write: Lsn, flush: Lsn, apply: Lsn, now_us: int, reply: bool = False) -> bytes:
    """A standby status update. For a logical slot `flush` is the position to confirm."""
    return _STATUS.pack(b"r", write, flush, apply, now_us - POSTGRES_EPOCH, reply)


def hot_standby_feedback(
    *, xmin: int, xmin_epoch: int, catalog_xmin: int, catalog_xmin_epoch: int, now_us: int
) -> bytes:
    """A hot standby feedback message: the oldest transactions that readers still see, 0 for none."""
    return _FEEDBACK.pack(
        b"h", now_us - POSTGRES_EPOCH, xmin, xmin_epoch, catalog_xmin, catalog_xmin_epoch
    )


def quote_name(name: str) -> str:
    """Quote a name. Raises `UsageError` for one that no server accepts."""
    if not name or "\0" in name or len(name.encode()) > 63:
        raise UsageError(f"{name[:80]!r} is not a name", repair="use 1 to 63 bytes without NUL")
    return '"' + name.replace('"', '""') + '"'


def quote_value(value: str) -> str:
    """Quote a string for the replication grammar (no backslash escapes)."""
    if "\0" in value:
        raise UsageError("a value holds a NUL byte")
    return "'" + value.replace("'", "''") + "'"


def quote_slot(slot: str) -> str:
    """A slot's name, quoted. Raises `UsageError` for one that no server accepts."""
    if _SLOT_NAME.fullmatch(slot) is None:
        raise UsageError(
            f"{slot[:80]!r} is not a slot name",
            repair="use 1 to 63 lower-case letters, digits and underscores",
        )
    return f'"{slot}"'


IDENTIFY_SYSTEM = "IDENTIFY_SYSTEM"


def timeline_history(timeline: int) -> str:
    """`TIMELINE_HISTORY`; a server has none for timeline 1."""
    return f"TIMELINE_HISTORY {timeline:d}"


def create_logical_slot(
    slot: str, *, temporary: bool = False, export_snapshot: bool = False
) -> str:
    """`CREATE_REPLICATION_SLOT ... LOGICAL pgoutput`, in the form that 11 to 18 read alike."""
    temporarily = " TEMPORARY" if temporary else ""
    snapshot = "EXPORT_SNAPSHOT" if export_snapshot else "NOEXPORT_SNAPSHOT"
    return f"CREATE_REPLICATION_SLOT {quote_slot(slot)}{temporarily} LOGICAL pgoutput {snapshot}"


def mark_for_failover(slot: str) -> str:
    """`ALTER_REPLICATION_SLOT`: enable synchronization of the slot to standbys (17 and later)."""
    return f"ALTER_REPLICATION_SLOT {quote_slot(slot)} (FAILOVER true)"


def start_logical(
    slot: str,
    publications: Sequence[str],
    *,
    server_version: int = 0,
    streaming: bool = False,
    start_lsn: Lsn = 0,
) -> str:
    """`START_REPLICATION ... LOGICAL` for pgoutput, with the newest protocol version that the server supports.

    `server_version` is a version number (160014); 0 requests protocol version 1, which every server supports.
    `streaming`: large transactions are sent while they are in progress (14 and later).
    From 14 on logical messages are sent too. Prepared transactions are sent at COMMIT PREPARED.
    A `start_lsn` at or below the slot's confirmed position, such as 0, starts at that position.
    """
    if not publications:
        raise UsageError("a stream needs at least one publication")
    major = server_version // 10000
    protocol = 4 if major >= 16 else 3 if major == 15 else 2 if major == 14 else 1
    names = quote_value(",".join(quote_name(name) for name in publications))
    options = f"proto_version '{protocol}', publication_names {names}"
    if protocol >= 2:
        options += ", messages 'true'"
        if streaming:
            options += f", streaming '{'parallel' if protocol >= 4 else 'on'}'"
    return f"START_REPLICATION SLOT {quote_slot(slot)} LOGICAL {format_lsn(start_lsn)} ({options})"


def start_physical(lsn: Lsn, timeline: int) -> str:
    """`START_REPLICATION ... PHYSICAL`, without a slot."""
    return f"START_REPLICATION PHYSICAL {format_lsn(lsn)} TIMELINE {timeline:d}"


def parse_identity(rows: Sequence[Row]) -> SystemIdentity:
    """The answer to `IDENTIFY_SYSTEM`. Raises `MalformedMessageError`."""
    match rows:
        case [(str(system_id), str(timeline), str(lsn), database)]:
            if system_id.isdecimal() and timeline.isdecimal():
                return SystemIdentity(int(system_id), int(timeline), parse_lsn(lsn), database or "")
    raise MalformedMessageError("not an answer to IDENTIFY_SYSTEM", where="walsender")


def parse_history(timeline: int, text: str) -> ServerTimelines:
    """A timeline history file: lines of `timeline, LSN where it was left, reason`.

    Raises `MalformedMessageError`, also for timelines that do not grow.
    """
    ancestors: list[WalPosition] = []
    for line in text.splitlines():
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _HISTORY_LINE.fullmatch(content)
        if match is None:
            raise MalformedMessageError(
                f"{line[:60]!r} is not a line of a timeline history", where="walsender"
            )
        ancestors.append(WalPosition(int(match[1]), parse_lsn(match[2])))
    order = [ancestor.timeline for ancestor in ancestors] + [timeline]
    if any(later <= earlier for earlier, later in itertools.pairwise(order)):
        raise MalformedMessageError(f"timelines {order} do not grow", where="walsender")
    return ServerTimelines(timeline, tuple(ancestors))


def _fault(what: str, data: bytes) -> MalformedMessageError:
    head = bytes(data[:16]).hex(" ")
    return MalformedMessageError(f"{what} (starts {head}, {len(data)} bytes)", where="walsender")
