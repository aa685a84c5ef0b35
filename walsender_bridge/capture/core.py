"""What capture decides, without sockets or clocks: `step(state, event) -> effects`.

One `State` lives as long as one session: a walsender's stream on one side, a writer of the log's
stream on the other. When either breaks, both are given up and a new state starts from what the log
holds. So nothing here survives a crash, and nothing has to.

Invariants.
- *Exactly once.* Commit records do not overlap, so a transaction is in the log iff its Begin's final
  LSN (the start of its commit record) is below the end LSN of the log's last transaction. Those that
  the server sends again are skipped whole.
- *Never early.* The server hears of an LSN only after the replica has made it durable as `confirm_to`,
  and it becomes `confirm_to` only if the log's order has committed everything that ends at or before
  it. A keepalive's LSN counts only while no transaction is open and nothing that was received waits:
  then everything that commits before it has been received, logged and committed.
- *The same history.* Nothing is appended or confirmed before what the server sends again has been found to
  be what the log holds (`overlap.py`).
- *Bounded.* At most one entry (1 MiB, or one message) is held uncut, and 64 MiB wait for the replica's
  acknowledgement; past that `State.reading` is false and the socket is left alone, while reports go on.

An entry is cut where a transaction ends if one does, so under load each entry's end is committable; a
transaction of several entries is cut where the size says. A transaction that changes no published
table (servers before 15 send its Begin and Commit) is not written: it is only a position.
"""

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from walsender_bridge.capture.overlap import Overlap
from walsender_bridge.change_log.entry import build_entry, read_header, schema_hash, schema_record
from walsender_bridge.errors import DivergedError, MalformedMessageError
from walsender_bridge.wire import pgoutput
from walsender_bridge.wire.lsn import MAX_LSN, format_lsn
from walsender_bridge.wire.replication import (
    XLOG_DATA,
    XLOG_HEADER_SIZE,
    parse_keepalive,
    parse_xlog_header,
)

#: Bytes of an entry's messages (with their length prefixes) at which it is cut.
ENTRY_BYTES: Final = 1 << 20
#: Seconds after its first message at which an entry that ends a transaction is cut, if the replica has
#: answered what it was sent.
ENTRY_SECONDS: Final = 0.020
#: Bytes of entries that may wait for the replica's acknowledgement.
IN_FLIGHT_BYTES: Final = 64 << 20
#: Seconds between reports to the server.
REPORT_SECONDS: Final = 1.0
#: Seconds between appends of nothing: while the log holds what is not confirmed, and otherwise.
BUSY_HEARTBEAT_SECONDS: Final = 0.1
IDLE_HEARTBEAT_SECONDS: Final = 1.0

_PREFIX: Final = 4
_BEGIN_SIZE: Final = XLOG_HEADER_SIZE + 21
_COMMIT_SIZE: Final = XLOG_HEADER_SIZE + 26
_FINAL_LSN: Final = struct.Struct(">Q")
_COMMIT: Final = struct.Struct(">QQq")
_ROWS: Final = frozenset(
    (pgoutput.INSERT, pgoutput.UPDATE, pgoutput.DELETE, pgoutput.TRUNCATE, pgoutput.ORIGIN)
)

# Where the stream stands: between transactions; after a Begin that nothing followed yet; inside a
# transaction that is taken; inside one that the log has.
_OUTSIDE, _BEGUN, _TAKING, _SKIPPING = range(4)


@dataclass(frozen=True, slots=True)
class Received:
    """CopyData payloads from the walsender, in order. `now`, here and below: monotonic seconds."""

    now: float
    payloads: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """The replica's answer to the oldest `Append` without one: LSNs are end LSNs."""

    now: float
    durable_lsn: int
    committed_lsn: int
    confirmed_to: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; `gate` is the commit gate's position."""

    now: float
    gate: int


Event = Received | Acknowledged | Tick


@dataclass(frozen=True, slots=True)
class Append:
    """Hand these to the replica: schema records first, then entries, as one batch.

    With neither it asks how far the log is committed. `confirm_to` is (timeline, LSN) to make durable.
    """

    entries: tuple[bytes, ...]
    schemas: tuple[bytes, ...]
    confirm_to: tuple[int, int] | None
    gate_lsn: int


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the server: `write` is durable in the log, `flush` is what the slot is confirmed to."""

    write: int
    flush: int


Effect = Append | Report


@dataclass(slots=True)
class State:
    """A session. The first five fields, and `overlap`, are what the log says when it begins.

    `logged_lsn` is the end LSN of the last transaction that was handed to the log, whole or (at the
    start) found in it; `previous_crc` the checksum of its last entry; `confirmed` the durable
    `confirm_to`.
    """

    timeline: int
    logged_lsn: int
    committed_lsn: int
    previous_crc: int
    confirmed: tuple[int, int]
    now: float

    gate: int = MAX_LSN
    overlap: Overlap = field(default_factory=Overlap)
    durable_lsn: int = 0
    #: End LSN of the last transaction that was received whole.
    received_lsn: int = field(init=False)
    #: Everything that commits at or before this, and is not above `received_lsn`, is known to be empty.
    idle_lsn: int = 0
    confirming: tuple[int, int] = field(init=False)
    #: The server waits for an answer: the next heartbeat is near.
    hurry: bool = False

    mode: int = _OUTSIDE
    final_lsn: int = 0
    begin: bytes = b""
    buffer: list[bytes] = field(default_factory=list)
    buffer_bytes: int = 0
    #: Messages of the buffer up to the end of its last whole transaction, and their bytes.
    whole: int = 0
    whole_bytes: int = 0
    whole_lsn: int = 0
    first_at: float = 0.0

    types: dict[int, bytes] = field(default_factory=dict)
    schema_hashes: dict[int, bytes] = field(default_factory=dict)
    new_schemas: list[bytes] = field(default_factory=list)
    new_entries: list[bytes] = field(default_factory=list)

    #: Bytes of each append without an answer, oldest first, and since when the oldest waits.
    in_flight: deque[tuple[int, float]] = field(default_factory=deque)
    in_flight_bytes: int = 0
    appended_at: float = field(init=False)
    reported_at: float = field(init=False)

    transactions: int = 0
    messages: int = 0

    def __post_init__(self) -> None:
        self.received_lsn = self.logged_lsn
        self.confirming = self.confirmed
        self.appended_at = self.now
        # The server hears at once how far its slot is confirmed.
        self.reported_at = self.now - REPORT_SECONDS

    @property
    def reading(self) -> bool:
        """Whether more may be taken from the walsender."""
        return self.in_flight_bytes < IN_FLIGHT_BYTES

    @property
    def waiting_since(self) -> float | None:
        """When the oldest append without an answer was made; None if there is none."""
        return self.in_flight[0][1] if self.in_flight else None

    @property
    def deadline(self) -> float:
        """When a `Tick` is due, unless something happens before."""
        due = self.reported_at + REPORT_SECONDS
        if not self.in_flight:
            if self.whole:
                due = min(due, self.first_at + ENTRY_SECONDS)
            due = min(due, self.appended_at + _heartbeat_seconds(self))
        return due


def step(state: State, event: Event) -> list[Effect]:
    """What `event` makes capture do; `state` is changed in place.

    Raises `MalformedMessageError` for bytes that are not the protocol, `DivergedError` when the
    server's transactions do not follow the log's.
    """
    effects: list[Effect] = []
    state.now = event.now
    if isinstance(event, Received):
        if _receive(state, event.payloads):
            _report(state, effects)
    elif isinstance(event, Acknowledged):
        _acknowledge(state, event, effects)
    else:
        state.gate = max(event.gate, 0)
    # Time cuts nothing while the replica is busy: it takes appends one after the other, so a small entry
    # would only wait there, and cost it a write of its own.
    if state.whole and not state.in_flight and state.now >= state.first_at + ENTRY_SECONDS:
        _cut(state)
    _append(state, effects)
    if state.now >= state.reported_at + REPORT_SECONDS:
        _report(state, effects)
    return effects


def _receive(state: State, payloads: Sequence[bytes]) -> bool:
    """Take the payloads in; True if the server asked for a report.

    Local names and one pass: this is the loop that each row goes through.
    """
    reply = False
    mode = state.mode
    buffer, held = state.buffer, state.buffer_bytes
    if not buffer:
        state.first_at = state.now
    for data in payloads:
        if not data or data[0] != XLOG_DATA:
            keepalive = parse_keepalive(data)
            if mode == _OUTSIDE and keepalive.wal_end > state.idle_lsn:
                state.overlap.passed(keepalive.wal_end)
                state.idle_lsn = keepalive.wal_end
            reply |= keepalive.reply_requested
            continue
        if len(data) <= XLOG_HEADER_SIZE:
            raise _fault("an XLogData message without data", data)
        kind = data[XLOG_HEADER_SIZE]
        if kind in _ROWS:
            if mode == _SKIPPING:
                continue
            if mode == _BEGUN:
                if not state.overlap.done:
                    state.overlap.taken(state.final_lsn)
                held = _room(state, held, len(state.begin) + _PREFIX)
                buffer.append(state.begin)
                held += len(state.begin) + _PREFIX
                mode = _TAKING
            elif mode != _TAKING:
                raise _fault("a change outside a transaction", data)
            size = len(data) - XLOG_HEADER_SIZE + _PREFIX
            if held + size > ENTRY_BYTES:
                held = _room(state, held, size)
            buffer.append(data[XLOG_HEADER_SIZE:])
            held += size
        elif kind == pgoutput.BEGIN:
            if len(data) != _BEGIN_SIZE or mode != _OUTSIDE:
                raise _fault("a Begin message of a wrong length, or inside a transaction", data)
            (state.final_lsn,) = _FINAL_LSN.unpack_from(data, XLOG_HEADER_SIZE + 1)
            state.begin = data[XLOG_HEADER_SIZE:]
            mode = _SKIPPING if state.final_lsn < state.received_lsn else _BEGUN
            if mode == _BEGUN:
                state.overlap.passed(state.final_lsn)
        elif kind == pgoutput.COMMIT:
            if len(data) != _COMMIT_SIZE or mode == _OUTSIDE:
                raise _fault("a Commit message of a wrong length, or outside a transaction", data)
            commit_lsn, end_lsn, commit_time = _COMMIT.unpack_from(data, XLOG_HEADER_SIZE + 2)
            if commit_lsn != state.final_lsn or (end_lsn <= state.received_lsn) != (
                mode == _SKIPPING
            ):
                raise _not_in_order(state, commit_lsn, end_lsn)
            if mode == _TAKING:
                size = _COMMIT_SIZE - XLOG_HEADER_SIZE + _PREFIX
                if held + size > ENTRY_BYTES:
                    held = _room(state, held, size)
                buffer.append(data[XLOG_HEADER_SIZE:])
                held += size
                state.received_lsn = state.whole_lsn = end_lsn
                state.whole, state.whole_bytes = len(buffer), held
                state.transactions += 1
            elif mode == _BEGUN:
                state.idle_lsn = max(state.idle_lsn, end_lsn)
            else:
                state.overlap.skipped(end_lsn, commit_time + pgoutput.POSTGRES_EPOCH)
            mode = _OUTSIDE
        elif kind == pgoutput.RELATION:
            state.buffer_bytes = held
            _relation(state, data[XLOG_HEADER_SIZE:])
            held = state.buffer_bytes
        elif kind == pgoutput.TYPE:
            message = bytes(data[XLOG_HEADER_SIZE:])
            state.types[pgoutput.relation_oid(message)] = message
        else:
            raise _fault(f"a message of unknown kind {chr(kind)!r}", data)
    state.mode, state.buffer_bytes = mode, held
    state.messages += len(payloads)
    state.hurry |= reply
    return reply


def _room(state: State, held: int, size: int) -> int:
    """Cut the buffer until `size` more bytes fit, or it is empty; returns the bytes still held."""
    state.buffer_bytes = held
    while state.buffer and state.buffer_bytes + size > ENTRY_BYTES:
        _cut(state)
    return state.buffer_bytes


def _relation(state: State, message: bytes) -> None:
    """Follow a Relation message: an entry holds one schema of a relation."""
    relation = pgoutput.parse_relation(message)
    own_types = sorted({c.type_oid for c in relation.columns} & state.types.keys())
    record = schema_record(message, [state.types[oid] for oid in own_types])
    digest = schema_hash(record)
    known = state.schema_hashes.get(relation.oid)
    if known == digest:
        return
    if known is not None:
        while state.buffer:
            _cut(state)
    state.schema_hashes[relation.oid] = digest
    # Also one that it had before: the log's newest schema of a relation is the last that was sent.
    state.new_schemas.append(record)


def _cut(state: State) -> None:
    """Make one entry: of the whole transactions in the buffer, or else of everything in it."""
    count = state.whole or len(state.buffer)
    entry = build_entry(
        state.buffer[:count],
        timeline=state.timeline,
        previous_crc=state.previous_crc,
        schema_hashes=state.schema_hashes,
    )
    if state.whole:
        state.logged_lsn = state.whole_lsn
        state.buffer_bytes -= state.whole_bytes
    else:
        state.buffer_bytes = 0
    # In place: the loop over the payloads holds this list.
    del state.buffer[:count]
    state.whole = state.whole_bytes = 0
    state.first_at = state.now
    state.previous_crc = read_header(entry).crc
    state.new_entries.append(entry)


def _acknowledge(state: State, event: Acknowledged, effects: list[Effect]) -> None:
    size, _ = state.in_flight.popleft()
    state.in_flight_bytes -= size
    state.durable_lsn = max(state.durable_lsn, event.durable_lsn)
    state.committed_lsn = max(state.committed_lsn, event.committed_lsn)
    if event.confirmed_to is not None and event.confirmed_to[1] > state.confirmed[1]:
        state.confirmed = event.confirmed_to
        state.hurry = False
        _report(state, effects)


def _confirmable(state: State) -> int:
    """Up to where the log's order has committed everything."""
    if not state.overlap.done:
        return 0
    idle = state.committed_lsn >= state.logged_lsn and not state.buffer and state.mode == _OUTSIDE
    # With nothing waiting, what the server said last is as good as its last transaction.
    return (
        max(state.committed_lsn, min(state.idle_lsn, state.gate)) if idle else state.committed_lsn
    )


def _heartbeat_seconds(state: State) -> float:
    busy = state.hurry or state.logged_lsn > state.confirmed[1]
    return BUSY_HEARTBEAT_SECONDS if busy else IDLE_HEARTBEAT_SECONDS


def _append(state: State, effects: list[Effect]) -> None:
    """Hand over what was cut; or ask how far the log is, when it is time and no answer is due."""
    if not state.new_entries:
        due = state.appended_at + _heartbeat_seconds(state)
        if state.in_flight or state.now < due:
            return
    confirm_to = None
    confirmable = _confirmable(state)
    if confirmable > state.confirming[1]:
        confirm_to = state.confirming = (state.timeline, confirmable)
    # What the server waits for may need one more turn, if it can be confirmed at all.
    state.hurry = confirm_to is not None
    entries, schemas = tuple(state.new_entries), tuple(state.new_schemas)
    state.new_entries.clear()
    state.new_schemas.clear()
    size = sum(map(len, entries))
    state.in_flight.append((size, state.now))
    state.in_flight_bytes += size
    state.appended_at = state.now
    effects.append(Append(entries, schemas, confirm_to, state.gate))


def _report(state: State, effects: list[Effect]) -> None:
    if effects and isinstance(effects[-1], Report):
        effects.pop()
    flush = state.overlap.confirmable(state.confirmed[1])
    effects.append(Report(max(state.durable_lsn, flush), flush))
    state.reported_at = state.now


def _fault(what: str, data: bytes) -> MalformedMessageError:
    lsn = format_lsn(parse_xlog_header(data).start_lsn)
    head = bytes(data[XLOG_HEADER_SIZE : XLOG_HEADER_SIZE + 16]).hex(" ")
    return MalformedMessageError(f"{what} (at {lsn}, starts {head})", where="walsender")


def _not_in_order(state: State, commit_lsn: int, end_lsn: int) -> DivergedError:
    return DivergedError(
        f"a transaction whose commit record is {format_lsn(commit_lsn)} to {format_lsn(end_lsn)} does"
        f" not follow the log, which ends at {format_lsn(state.received_lsn)}",
        where="walsender",
        repair="the log and the server have different histories; a source under a new name starts over",
    )
