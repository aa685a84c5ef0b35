"""The core of capture, without sockets or clocks: `step(state, event) -> effects`.

A `CaptureState` exists for one session: a walsender's stream on one side, a writer of the log's stream
on the other. When either breaks, both are closed, and a new state starts from the contents of the log.
So no state in this module survives a crash, and none needs to.

Invariants.
- *Exactly once.* Commit records do not overlap, so a transaction is in the log iff its Begin's final
  LSN (the start of its commit record) is below the end LSN of the log's last transaction. Transactions that
  the server sends again are skipped whole. A Stream Commit carries the same two ends of the commit record; a
  non-transactional message carries the end of its own record, and is in the log iff that end is not above the log's.
- *Never early.* An LSN is reported to the server only after the replica has made it durable as `confirm_to`,
  and it becomes `confirm_to` only once the log has committed everything that ends at or before
  it. A keepalive's LSN counts only while no transaction is open and nothing received is pending:
  then everything that commits before it has been received, logged and committed.
- *The same history.* Nothing is appended or confirmed until the transactions that the server sends again have been
  verified against the log (`overlap.py`).
- *Bounded.* At most one entry (1 MiB, or one message) is buffered uncut, `GATHERED_BYTES` and one entry are cut and not
  yet appended, and 64 MiB await the replica's acknowledgement; beyond that `CaptureState.reading` is false and the
  socket is not read, while status updates continue. The same applies when the log holds more than
  `max_uncommitted_bytes` of uncommitted WAL behind a closed gate: the server then retains the WAL.

An entry is cut at the end of a transaction if it contains one, so under load the end of each entry is committable; a
transaction of several entries is cut by size. A transaction that changes no published
table (servers before 15 send its Begin and Commit) is not written: it only advances the position.

What an append costs the replicas and the repository hardly depends on its length, so capture pauses between two of
them for a multiple of what the first one took (`PACE`), and appends together what it cut meanwhile.

A transaction that is streamed while in progress is kept outside the log (package `spool`). Its commit
suspends reading until the driver has returned all of it (`Replayed`), so the log receives it as the server
would have sent it after COMMIT: whole, in commit order, in the same form.
"""

import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from walsender_bridge.capture import entries
from walsender_bridge.capture.entries import PREFIX, Entries
from walsender_bridge.capture.events import (
    Acknowledged,
    AppendToReplica,
    CopyDataReceived,
    Effect,
    Event,
    Replayed,
    StandbyStatusUpdate,
)
from walsender_bridge.capture.overlap import Overlap
from walsender_bridge.capture.replay import Replay
from walsender_bridge.capture.spool.core import Streams
from walsender_bridge.errors import DivergedError, MalformedMessageError
from walsender_bridge.postgres.protocol import pgoutput
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, Lsn, WalPosition, format_lsn
from walsender_bridge.postgres.protocol.replication import (
    KEEPALIVE,
    XLOG_DATA,
    XLOG_HEADER_SIZE,
    parse_keepalive,
    parse_xlog_header,
)

#: Seconds after its first message at which an entry that ends a transaction is cut, provided that an append may begin.
ENTRY_SECONDS: Final = 0.020
#: An append begins that many times as long after the one before it as that one took, but at most `LONGEST_PACE` seconds after
#: it, and not while one is in flight. The repository commits no more often than that.
PACE: Final = 10
LONGEST_PACE: Final = 0.1
#: What is appended without that pause: that many bytes of entries, or that many entries.
GATHERED_BYTES: Final = 1 << 20
GATHERED_ENTRIES: Final = 16
#: Bytes of uncommitted WAL that a log may hold, from its last committed transaction to its end.
MAX_UNCOMMITTED_BYTES: Final = 16 << 30
#: Bytes of entries that may await the replica's acknowledgement.
IN_FLIGHT_BYTES: Final = 64 << 20
#: The same while a spooled transaction is replayed: the rest of it is on disk and needs no memory.
REPLAY_BYTES: Final = 8 << 20
#: Seconds between status updates to the server.
REPORT_SECONDS: Final = 1.0
#: Seconds between heartbeats (empty appends): while the log holds unconfirmed transactions, and otherwise.
BUSY_HEARTBEAT_SECONDS: Final = 0.1
IDLE_HEARTBEAT_SECONDS: Final = 1.0
#: Seconds without an acknowledgement of an append after which another one follows, with whatever there is to append: where a
#: replica hangs, the stream is sealed for the others to go on without it, and only an append is told so.
UNANSWERED_SECONDS: Final = 2.0

_BEGIN_SIZE: Final = XLOG_HEADER_SIZE + 21
_COMMIT_SIZE: Final = XLOG_HEADER_SIZE + 26
_FINAL_LSN: Final = struct.Struct(">Q")
_COMMIT: Final = struct.Struct(">QQq")
#: Slices that strip the header off a message, created once rather than per message, and the difference in length.
_TAIL: Final = slice(XLOG_HEADER_SIZE, None)
_LESS: Final = XLOG_HEADER_SIZE - PREFIX
#: The kinds of message inside a transaction; a Message may also occur outside of one.
_INSIDE: Final = frozenset(
    (
        *(pgoutput.INSERT, pgoutput.UPDATE, pgoutput.DELETE, pgoutput.TRUNCATE),
        *(pgoutput.ORIGIN, pgoutput.MESSAGE),
    )
)

# The position in the stream: between transactions; after a Begin and before its first change; inside a
# transaction that is appended; inside a transaction that the log already has.
_OUTSIDE, _BEGUN, _APPENDING, _SKIPPING = range(4)


@dataclass(slots=True, kw_only=True)
class CaptureState(Entries):
    """A session. The fields without a default, and `overlap`, are read from the log when the session begins.

    `confirmed` is the durable `confirm_to`.
    """

    committed_lsn: Lsn
    confirmed: WalPosition

    gate: Lsn = MAX_LSN
    #: Bytes of WAL that the log may hold uncommitted: transactions behind the gate are on the log's disk up to this limit.
    max_uncommitted_bytes: int = MAX_UNCOMMITTED_BYTES
    overlap: Overlap = field(default_factory=Overlap)
    durable_lsn: Lsn = 0
    #: Between `received_lsn` and this LSN no transaction with changes commits.
    idle_lsn: Lsn = 0
    confirming: WalPosition = field(init=False)
    #: The gate position last sent to the replica.
    reported_gate: Lsn = field(init=False)
    #: The server has requested a reply: the next heartbeat is due early.
    reply_requested: bool = False

    mode: int = _OUTSIDE
    final_lsn: Lsn = 0
    begin: bytes = b""

    #: Bytes of each unacknowledged append, oldest first, and when it was sent.
    in_flight: deque[tuple[int, float]] = field(default_factory=deque)
    in_flight_bytes: int = 0
    appended_at: float = field(init=False)
    #: When the next append of entries may begin.
    paced_to: float = 0.0
    reported_at: float = field(init=False)

    #: Transactions that are streamed while in progress, and the one that is being replayed into the log.
    streams: Streams = field(default_factory=Streams)
    replay: Replay | None = None

    messages: int = 0

    def __post_init__(self) -> None:
        Entries.__post_init__(self)
        self.confirming = self.confirmed
        self.reported_gate = self.gate
        self.appended_at = self.now
        # The first status update, with the slot's confirmed position, is sent at once.
        self.reported_at = self.now - REPORT_SECONDS

    @property
    def reading(self) -> bool:
        """Whether the walsender's socket may be read."""
        uncommitted = self.logged_lsn - max(self.committed_lsn, self.confirmed.lsn)
        return (
            self.in_flight_bytes < IN_FLIGHT_BYTES
            and self.replay is None
            and uncommitted < self.max_uncommitted_bytes
        )

    @property
    def replaying(self) -> int | None:
        """The xid of the spooled transaction of which the next part is wanted (`Replayed`); or None."""
        if self.replay is None or self.in_flight_bytes >= REPLAY_BYTES:
            return None
        return self.replay.spooled.xid

    @property
    def waiting_since(self) -> float | None:
        """When the oldest unacknowledged append was sent; None if there is none."""
        return self.in_flight[0][1] if self.in_flight else None

    @property
    def unanswered(self) -> bool:
        """Whether the last append waits for its acknowledgement for so long that another one follows."""
        return bool(self.in_flight) and self.now >= self.appended_at + UNANSWERED_SECONDS

    @property
    def gathers(self) -> bool:
        """Whether entries wait for those that follow, to be appended together."""
        if self.unanswered or (not self.in_flight and self.now >= self.paced_to):
            return False
        size = sum(map(len, self.new_entries))
        return size < GATHERED_BYTES and len(self.new_entries) < GATHERED_ENTRIES

    @property
    def deadline(self) -> float:
        """When a `CaptureTick` is due unless another event arrives first."""
        due = self.reported_at + REPORT_SECONDS
        if self.in_flight:
            due = min(due, self.appended_at + UNANSWERED_SECONDS)
        else:
            if self.whole:
                due = min(due, max(self.first_at + ENTRY_SECONDS, self.paced_to))
            if self.new_entries:
                return min(due, self.paced_to)
            due = min(due, self.appended_at + _heartbeat_seconds(self))
        return due


def step(state: CaptureState, event: Event) -> list[Effect]:
    """Apply `event` to `state` in place and return the effects.

    Raises `MalformedMessageError` on a protocol violation, `DivergedError` when the server's transactions do not
    follow the log's.
    """
    effects: list[Effect] = []
    state.now = event.now
    if isinstance(event, CopyDataReceived):
        if _receive(state, event.payloads):
            _report(state, effects)
    elif isinstance(event, Replayed):
        waiting = _replay(state, event.messages)
        if waiting and _receive(state, waiting):
            _report(state, effects)
    elif isinstance(event, Acknowledged):
        _acknowledge(state, event, effects)
    else:
        state.gate = max(event.gate, 0)
    # No entry is cut by time while it could not be appended: the replica processes appends one at a time, so a small
    # entry would only queue there, and cost a write of its own.
    due = max(state.first_at + ENTRY_SECONDS, state.paced_to)
    if state.whole and not state.in_flight and state.now >= due:
        state.cut()
    _append(state, effects)
    if state.streams.effects:
        effects += state.streams.effects
        state.streams.effects.clear()
    if state.now >= state.reported_at + REPORT_SECONDS:
        _report(state, effects)
    return effects


def _receive(state: CaptureState, payloads: Sequence[bytes]) -> bool:
    """Process the payloads; True if the server requested a reply.

    Local names and a single pass: every row passes through this loop.
    """
    reply = False
    mode = state.mode
    buffer, buffered, limit = state.buffer, state.buffer_bytes, entries.ENTRY_BYTES
    tail, add, inside = _TAIL, buffer.append, _INSIDE
    if not buffer:
        state.first_at = state.now
    state.messages += len(payloads)
    rest = iter(payloads)
    if state.streams.inside:
        reply = state.streams.take(rest)
    for data in rest:
        try:
            tag, kind = data[0], data[XLOG_HEADER_SIZE]
        except IndexError:
            if data and data[0] == XLOG_DATA:
                raise _fault("XLogData message without data", data) from None
            tag, kind = KEEPALIVE, 0
        if tag != XLOG_DATA:
            keepalive = parse_keepalive(data)
            if mode == _OUTSIDE and keepalive.wal_end > state.idle_lsn:
                state.overlap.passed(keepalive.wal_end)
                state.idle_lsn = keepalive.wal_end
            reply |= keepalive.reply_requested
            continue
        if kind in inside:
            if mode != _APPENDING:
                if mode == _SKIPPING:
                    # It has the row that its relations were described for.
                    state.described = None
                    state.partitions.clear()
                    continue
                if mode == _OUTSIDE:
                    buffered = _message(state, data, buffered)
                    continue
                if not state.overlap.done:
                    state.overlap.taken(state.final_lsn)
                buffered = state.room(buffered, len(state.begin) + PREFIX)
                add(state.begin)
                buffered += len(state.begin) + PREFIX
                mode = _APPENDING
            size = len(data) - _LESS
            buffered += size
            if buffered > limit:
                buffered = state.room(buffered - size, size) + size
            add(data[tail])
        elif kind == pgoutput.BEGIN:
            if len(data) != _BEGIN_SIZE or mode != _OUTSIDE:
                raise _fault("Begin message has a wrong length or is inside a transaction", data)
            (state.final_lsn,) = _FINAL_LSN.unpack_from(data, XLOG_HEADER_SIZE + 1)
            state.begin = data[XLOG_HEADER_SIZE:]
            mode = _SKIPPING if state.final_lsn < state.received_lsn else _BEGUN
            if mode == _BEGUN:
                state.overlap.passed(state.final_lsn)
        elif kind == pgoutput.COMMIT:
            if len(data) != _COMMIT_SIZE or mode == _OUTSIDE:
                raise _fault("Commit message has a wrong length or is outside a transaction", data)
            commit_lsn, end_lsn, commit_time = _COMMIT.unpack_from(data, XLOG_HEADER_SIZE + 2)
            if commit_lsn != state.final_lsn or (end_lsn <= state.received_lsn) != (
                mode == _SKIPPING
            ):
                raise _not_in_order(state, commit_lsn, end_lsn)
            if mode == _APPENDING:
                size = _COMMIT_SIZE - XLOG_HEADER_SIZE + PREFIX
                if buffered + size > limit:
                    buffered = state.room(buffered, size)
                buffer.append(data[XLOG_HEADER_SIZE:])
                buffered += size
                state.end_transaction(end_lsn, buffered)
            elif mode == _BEGUN:
                state.idle_lsn = max(state.idle_lsn, end_lsn)
            else:
                state.overlap.skipped(end_lsn, commit_time + pgoutput.POSTGRES_EPOCH)
            mode = _OUTSIDE
        elif kind == pgoutput.RELATION:
            state.buffer_bytes = buffered
            state.streams.described(state.relation(data[XLOG_HEADER_SIZE:]))
            buffered = state.buffer_bytes
        elif kind == pgoutput.TYPE:
            message = bytes(data[XLOG_HEADER_SIZE:])
            state.types[pgoutput.relation_oid(message)] = message
        elif mode != _OUTSIDE:
            raise _fault(f"unexpected message of kind {chr(kind)!r} in a transaction", data)
        elif kind == pgoutput.STREAM_START:
            state.streams.start(data[XLOG_HEADER_SIZE:])
            reply |= state.streams.take(rest)
        elif kind == pgoutput.STREAM_ABORT:
            state.streams.abort(data[XLOG_HEADER_SIZE:])
        elif kind == pgoutput.STREAM_COMMIT:
            state.buffer_bytes = buffered
            _stream_commit(state, data[XLOG_HEADER_SIZE:])
            buffered = state.buffer_bytes
            if state.replay is not None:
                state.replay.waiting += rest
                state.messages -= len(state.replay.waiting)
        else:
            raise _fault(f"unknown message kind {chr(kind)!r}", data)
    state.mode, state.buffer_bytes = mode, buffered
    state.reply_requested |= reply
    return reply


def _message(state: CaptureState, data: bytes, buffered: int) -> int:
    """Append a non-transactional logical message as a transaction of its own with xid 0."""
    if data[XLOG_HEADER_SIZE] != pgoutput.MESSAGE:
        raise _fault("change outside a transaction", data)
    text = data[XLOG_HEADER_SIZE:]
    message = pgoutput.parse_message(text)
    if message.transactional:
        raise _fault("transactional message outside a transaction", data)
    if message.end_lsn <= state.received_lsn:
        # It carries the send time, which differs when the server sends it again.
        state.overlap.skipped(message.end_lsn, state.overlap.commit_time)
        return buffered
    state.overlap.passed(message.end_lsn - 1)
    if not state.overlap.done:
        state.overlap.taken(message.end_lsn - 1)
    # The message does not carry the start of its record; one byte before the end lies behind every earlier record.
    end, moment = message.end_lsn, parse_xlog_header(data).sent_at
    begin = pgoutput.build_begin(pgoutput.Begin(end - 1, moment, 0))
    commit = pgoutput.build_commit(pgoutput.Commit(end - 1, end, moment))
    whole = (begin, text, commit)
    size = sum(map(len, whole)) + len(whole) * PREFIX
    # Always in one entry, whatever its length: a transaction with xid 0 cannot continue in the next.
    buffered = state.room(buffered, size) + size
    state.buffer += whole
    state.end_transaction(end, buffered)
    return buffered


def _stream_commit(state: CaptureState, message: bytes) -> None:
    """Start the replay of a streamed transaction that has committed, unless the log has it already."""
    commit, spooled = state.streams.commit(message)
    known = commit.commit_lsn < state.received_lsn
    if (commit.end_lsn <= state.received_lsn) != known:
        raise _not_in_order(state, commit.commit_lsn, commit.end_lsn)
    if known:
        state.overlap.skipped(commit.end_lsn, commit.commit_time)
    else:
        state.overlap.passed(commit.commit_lsn)
    if known or not spooled.length:
        if not known:
            state.idle_lsn = max(state.idle_lsn, commit.end_lsn)
        for oid, record in state.streams.done(spooled):
            state.describe(oid, record)
        return
    if not state.overlap.done:
        state.overlap.taken(commit.commit_lsn)
    state.replay = Replay.start(state, spooled, commit)


def _replay(state: CaptureState, messages: Sequence[bytes]) -> list[bytes]:
    """Append a part of the spooled transaction; at its end, return the payloads that were deferred."""
    replay = state.replay
    assert replay is not None
    if not replay.take(state, messages):
        return []
    state.replay = None
    for oid, record in state.streams.done(replay.spooled):
        state.describe(oid, record)
    return replay.waiting


def _acknowledge(state: CaptureState, event: Acknowledged, effects: list[Effect]) -> None:
    size, sent_at = state.in_flight.popleft()
    state.in_flight_bytes -= size
    if size:
        state.paced_to = sent_at + min(PACE * event.took, LONGEST_PACE)
    state.durable_lsn = max(state.durable_lsn, event.durable_lsn)
    state.committed_lsn = max(state.committed_lsn, event.committed_lsn)
    if event.confirmed_to is not None and event.confirmed_to.lsn > state.confirmed.lsn:
        state.confirmed = event.confirmed_to
        state.reply_requested = False
        _report(state, effects)


def _confirmable(state: CaptureState) -> Lsn:
    """The LSN up to which the log has committed everything."""
    if not state.overlap.done:
        return 0
    idle = state.committed_lsn >= state.logged_lsn and not state.buffer and state.mode == _OUTSIDE
    # With nothing pending, the server's last keepalive is as good as its last transaction.
    return (
        max(state.committed_lsn, min(state.idle_lsn, state.gate)) if idle else state.committed_lsn
    )


def _heartbeat_seconds(state: CaptureState) -> float:
    busy = state.reply_requested or state.logged_lsn > state.confirmed.lsn
    return BUSY_HEARTBEAT_SECONDS if busy else IDLE_HEARTBEAT_SECONDS


def _opened(state: CaptureState) -> bool:
    """Whether the gate has advanced past the position that the replica has, and a transaction waits for it."""
    waits = state.logged_lsn > max(state.committed_lsn, state.reported_gate)
    return waits and state.gate > state.reported_gate


def _append(state: CaptureState, effects: list[Effect]) -> None:
    """Append the entries that were cut; or send a heartbeat if one is due."""
    if state.new_entries:
        if state.gathers and (state.in_flight or not _opened(state)):
            return
    elif not state.unanswered:
        due = state.appended_at + _heartbeat_seconds(state)
        if state.in_flight or not (state.now >= due or _opened(state)):
            return
    confirm_to = None
    confirmable = _confirmable(state)
    if confirmable > state.confirming.lsn:
        confirm_to = state.confirming = WalPosition(state.timeline, confirmable)
    # The position that the server waits for may need one more round trip, if it can be confirmed at all.
    state.reply_requested = confirm_to is not None
    entries, schemas = tuple(state.new_entries), tuple(state.new_schemas)
    state.new_entries.clear()
    state.new_schemas.clear()
    size = sum(map(len, entries))
    state.in_flight.append((size, state.now))
    state.in_flight_bytes += size
    state.appended_at = state.now
    state.reported_gate = state.gate
    effects.append(AppendToReplica(entries, schemas, confirm_to, state.gate))


def _report(state: CaptureState, effects: list[Effect]) -> None:
    if effects and isinstance(effects[-1], StandbyStatusUpdate):
        effects.pop()
    flush = state.overlap.confirmable(state.confirmed.lsn)
    effects.append(StandbyStatusUpdate(max(state.durable_lsn, flush), flush))
    state.reported_at = state.now


def _fault(what: str, data: bytes) -> MalformedMessageError:
    lsn = format_lsn(parse_xlog_header(data).start_lsn)
    head = bytes(data[XLOG_HEADER_SIZE : XLOG_HEADER_SIZE + 16]).hex(" ")
    return MalformedMessageError(f"{what} (at {lsn}, starts {head})", where="walsender")


def _not_in_order(state: CaptureState, commit_lsn: Lsn, end_lsn: Lsn) -> DivergedError:
    return DivergedError(
        f"a transaction whose commit record is {format_lsn(commit_lsn)} to {format_lsn(end_lsn)} does"
        f" not follow the log, which ends at {format_lsn(state.received_lsn)}",
        where="walsender",
        repair="the log and the server have different histories; run `tuskline reattach --force` to start over from the server",
    )
