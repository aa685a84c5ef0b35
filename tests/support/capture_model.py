"""A walsender, a replica and a metadata repository in a few lines, to run capture's core against.

They do what the real ones promise and nothing more: the walsender sends every transaction that ends
above what its slot is confirmed to, and may forget a confirmation when it crashes; the replica keeps
what it acknowledged, a new writer loses an unfinished tail, and a seal may lose everything that was
not committed.
"""

import random
import struct
from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, field

from tests.support import pgoutput_messages as pg
from walsender_bridge.capture import core, events
from walsender_bridge.capture.overlap import Overlap
from walsender_bridge.change_log import entry
from walsender_bridge.postgres.protocol import pgoutput
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.postgres.protocol.pgoutput import POSTGRES_EPOCH

TABLES = (16385, 16390, 16400)
MOOD = 16500
FIRST_CONFIRMED = WalPosition(1, 0x1000)


def xlog(message: bytes, lsn: int = 0) -> bytes:
    """A pgoutput message as a CopyData payload."""
    return b"w" + struct.pack(">QQq", lsn, lsn, 0) + message


def keepalive(wal_end: int, *, reply: bool = False) -> bytes:
    """A keepalive payload."""
    return b"k" + struct.pack(">QqB", wal_end, 0, reply)


def schema(oid: int, generation: int) -> list[bytes]:
    """Type and Relation messages of a table after `generation` changes of its columns."""
    columns = [("id", 23), ("mood", MOOD), *((f"extra{i}", 25) for i in range(generation))]
    return [pg.type_message(MOOD, "mood"), pg.relation(oid, f"t{oid}", columns)]


@dataclass
class Transaction:
    """What committed: what the log must hold of it, nothing if no published table changed."""

    commit_lsn: int
    end_lsn: int
    content: list[bytes]


@dataclass
class Change:
    """A row message of a (sub)transaction, and the generation of its table that it was written in."""

    lsn: int
    xid: int
    subxid: int
    oid: int
    generation: int
    message: bytes
    #: The table was altered by this transaction just before.
    alters: bool


@dataclass
class Undone:
    """Subtransactions that were rolled back together, those inside first."""

    lsn: int
    xid: int
    subxids: list[int]


@dataclass
class End:
    """A commit or abort record."""

    lsn: int
    xid: int
    committed: bool
    time: int


@dataclass
class Note:
    """A logical message of no transaction."""

    lsn: int
    message: bytes


Record = Change | Undone | End | Note


@dataclass
class Sub:
    """An open (sub)transaction. It has an xid from its first change, or that of one inside it."""

    #: How many of the transaction's changes came before.
    before: int
    xid: int | None = None
    inside: list[int] = field(default_factory=list)
    #: Generations of the tables that it altered, before it did.
    altered: dict[int, int] = field(default_factory=dict)


@dataclass
class Running:
    """A transaction in progress: its changes that stand so far, and its open subtransactions."""

    stack: list[Sub]
    changes: list[Change] = field(default_factory=list)
    tables: set[int] = field(default_factory=set)

    @property
    def xid(self) -> int:
        assert self.stack[0].xid is not None
        return self.stack[0].xid


class Server:
    """A source with one slot. It streams what runs long, if `streams`; each session by its own lot."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.wal: list[Record] = []
        self.transactions: list[Transaction] = []
        self.running: list[Running] = []
        self.end = 0x1000
        self.confirmed = 0x1000
        self.confirmed_on_disk = 0x1000
        self.xid = 700
        self.generations = dict.fromkeys(TABLES, 0)
        self.newest = dict.fromkeys(TABLES, 0)
        self.sends_empty = rng.random() < 0.5
        self.streams = rng.random() < 0.85
        self.parallel = rng.random() < 0.5
        self.clock = [pg.START_TIME]

    def copy(self) -> "Server":
        """A copy of its data directory: the same history and slot up to here, as they are on disk."""
        other = copy(self)
        other.wal = list(self.wal)
        other.transactions = list(self.transactions)
        other.running = deepcopy(self.running)
        other.generations, other.newest = dict(self.generations), dict(self.newest)
        other.crash()
        return other

    # -- what applications do ---------------------------------------------------------------------

    def _lsn(self, length: int) -> int:
        """Write a record; where it starts."""
        start = self.end + self.rng.randrange(0, 100)
        self.end = start + length
        return start

    def _change(self, one: Running) -> None:
        """Something happens to a row, perhaps behind an ALTER TABLE."""
        rng = self.rng
        others = [r for r in self.running if r is not one]
        # What another has altered is locked.
        free = [
            oid
            for oid in TABLES
            if not any(oid in sub.altered for other in others for sub in other.stack)
        ]
        if not free:
            return
        for sub in one.stack:
            if sub.xid is None:
                self.xid += 1
                sub.xid = self.xid
        oid = rng.choice(free)
        alters = rng.random() < 0.1 and not any(oid in other.tables for other in others)
        if alters:
            one.stack[-1].altered.setdefault(oid, self.generations[oid])
            self.newest[oid] += 1
            self.generations[oid] = self.newest[oid]
        generation = self.generations[oid]
        values = [b"%d" % generation, rng.randbytes(rng.randrange(40)), None]
        make = rng.choice((pg.insert, pg.update, pg.delete))
        message = pg.truncate(oid) if rng.random() < 0.05 else make(oid, values)
        one.tables.add(oid)
        subxid = one.stack[-1].xid
        assert subxid is not None
        change = Change(self._lsn(20), one.xid, subxid, oid, generation, message, alters)
        self.wal.append(change)
        one.changes.append(change)

    def _undo(self, one: Running) -> Sub:
        """The innermost subtransaction is rolled back."""
        sub = one.stack.pop()
        del one.changes[sub.before :]
        self.generations |= sub.altered
        return sub

    def step(self) -> None:
        """A long transaction begins, goes on or ends."""
        rng = self.rng
        if not self.running or (len(self.running) < 3 and rng.random() < 0.1):
            self.xid += 1
            self.running.append(Running([Sub(0, self.xid)]))
        one = rng.choice(self.running)
        match rng.randrange(11):
            case 0 | 1:
                one.stack.append(Sub(len(one.changes)))
            case 2 if len(one.stack) > 1:
                sub = one.stack.pop()
                one.stack[-1].inside += [*sub.inside, *([] if sub.xid is None else [sub.xid])]
                one.stack[-1].altered = sub.altered | one.stack[-1].altered
            case 3 | 10 if len(one.stack) > 1:
                sub = self._undo(one)
                if sub.xid is not None:
                    self.wal.append(Undone(self._lsn(30), one.xid, [*sub.inside, sub.xid]))
            case 4 if rng.random() < 0.4:
                self.finish(one, committed=rng.random() < 0.7)
            case _:
                for _ in range(rng.randrange(1, 5)):
                    self._change(one)

    def finish(self, one: Running, *, committed: bool) -> None:
        """Commit or roll back a transaction."""
        self.running.remove(one)
        lsn = self._lsn(pg.COMMIT_RECORD)
        # No two moments are one, on this server or on a copy of it.
        self.clock[0] += self.rng.randrange(1, 5000)
        self.wal.append(End(lsn, one.xid, committed, self.clock[0]))
        if not committed:
            while one.stack:
                self._undo(one)
            return
        rows = [change.message for change in one.changes]
        content = pg.transaction(lsn, one.xid, rows, self.clock[0]) if rows else []
        self.transactions.append(Transaction(lsn, self.end, content))

    def commit(self) -> None:
        """One short transaction, some of them without a published change; or a message of none."""
        if self.rng.random() < 0.1:
            start = self._lsn(40)
            message = pg.message(self.end, "note", b"%d" % start)
            self.wal.append(Note(start, message))
            self.transactions.append(
                Transaction(
                    self.end - 1,
                    self.end,
                    [
                        pg.begin(self.end - 1, 0, POSTGRES_EPOCH),
                        message,
                        pg.commit(self.end - 1, self.end, POSTGRES_EPOCH),
                    ],
                )
            )
            return
        self.xid += 1
        one = Running([Sub(0, self.xid)])
        self.running.append(one)
        for _ in range(self.rng.choice((0, 1, 2, 6))):
            self._change(one)
        self.finish(one, committed=True)

    def crash(self) -> None:
        """What the slot was told since its last write to disk is forgotten, and nothing runs any more."""
        self.confirmed = self.confirmed_on_disk
        for one in list(self.running):
            self.finish(one, committed=False)

    def save(self) -> None:
        self.confirmed_on_disk = self.confirmed

    def stream(self) -> Iterator[bytes]:
        """Payloads of one session, without end: keepalives when there is nothing else."""
        return self._stream(Sender(self))

    def _stream(self, sender: "Sender") -> Iterator[bytes]:
        at = 0
        while True:
            if at == len(self.wal):
                yield keepalive(self.end, reply=self.rng.random() < 0.1)
                continue
            yield from sender.decode(self.wal[at])
            at += 1
            if self.rng.random() < 0.05:
                yield keepalive(self.wal[at - 1].lsn)


class Sender:
    """A walsender: PostgreSQL's reorder buffer, and what pgoutput knows of what it has sent."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.rng = server.rng
        self.start = server.confirmed
        self.eager = self.rng.choice((0.05, 0.6))
        self.waiting: dict[int, list[Change]] = {}
        self.streamed: set[int] = set()
        #: Tables whose schema was sent in this session, and those sent in a transaction in progress.
        self.sent: set[int] = set()
        self.sent_in: dict[int, set[int]] = {oid: set() for oid in TABLES}

    def decode(self, record: Record) -> Iterator[bytes]:
        match record:
            case Note():
                if record.lsn >= self.start:
                    yield xlog(record.message)
            case Change():
                self.waiting.setdefault(record.xid, []).append(record)
                can = self.server.streams and record.lsn >= self.start
                if can and self.rng.random() < self.eager:
                    found = [xid for xid, changes in self.waiting.items() if changes]
                    yield from self.block(self.rng.choice(found))
            case Undone():
                for subxid in record.subxids:
                    yield from self.abort(record.xid, subxid)
            case End(committed=False):
                self.waiting.pop(record.xid, None)
                yield from self.abort(record.xid, record.xid)
            case End():
                yield from self.commit(record)

    def abort(self, xid: int, subxid: int) -> Iterator[bytes]:
        changes = self.waiting.get(xid, [])
        self.waiting[xid] = [change for change in changes if change.subxid != subxid]
        if subxid in self.streamed:
            yield xlog(pg.stream_abort(xid, subxid, parallel=self.server.parallel))
            for known in self.sent_in.values():
                known.discard(xid)

    def commit(self, record: End) -> Iterator[bytes]:
        end_lsn = record.lsn + pg.COMMIT_RECORD
        changes = self.waiting.pop(record.xid, [])
        if record.xid in self.streamed:
            self.waiting[record.xid] = changes
            if changes:
                yield from self.block(record.xid)
            yield xlog(pg.stream_commit(record.xid, record.lsn, end_lsn, record.time))
            for oid, known in self.sent_in.items():
                if record.xid in known:
                    known.discard(record.xid)
                    self.sent.add(oid)
            return
        send = record.lsn >= self.start
        around = send and bool(changes or self.server.sends_empty)
        if around:
            yield xlog(pg.begin(record.lsn, record.xid, record.time), record.lsn)
        for change in changes:
            self.invalidate(change)
            if send:
                if change.oid not in self.sent:
                    self.sent.add(change.oid)
                    yield from map(xlog, schema(change.oid, change.generation))
                yield xlog(change.message)
                if self.rng.random() < 0.05:
                    yield keepalive(record.lsn - 1)
        if around:
            yield xlog(pg.commit(record.lsn, end_lsn, record.time))
        for change in changes:
            self.invalidate(change)

    def block(self, xid: int) -> Iterator[bytes]:
        """All that waits of a transaction."""
        yield xlog(pg.stream_start(xid, first=xid not in self.streamed))
        changes, self.waiting[xid] = self.waiting[xid], []
        self.streamed |= {xid, *(change.subxid for change in changes)}
        for change in changes:
            self.invalidate(change)
            if xid not in self.sent_in[change.oid]:
                self.sent_in[change.oid].add(xid)
                for message in schema(change.oid, change.generation):
                    yield xlog(pg.in_block(change.subxid, message))
            yield xlog(pg.in_block(change.subxid, change.message))
            if self.rng.random() < 0.05:
                yield keepalive(change.lsn)
        for change in changes:
            self.invalidate(change)
        yield xlog(pg.stream_stop())

    def invalidate(self, change: Change) -> None:
        """Forget what was sent of a table that was altered; done before and behind, as the server does."""
        if change.alters:
            self.sent.discard(change.oid)
            self.sent_in[change.oid].clear()


@dataclass
class Replica:
    """The log's only replica, with the repository that commits it."""

    confirmed_to: WalPosition = FIRST_CONFIRMED
    entries: list[bytes] = field(default_factory=list)
    committed: int = 0
    gate: int = 0
    registry: dict[bytes, bytes] = field(default_factory=dict)

    def append(self, batch: events.AppendToReplica) -> None:
        """One durable transaction. Every entry follows the one before it."""
        for record in batch.schemas:
            self.registry[entry.schema_hash(record)] = record
        for data in batch.entries:
            entry.verify(data, self.last_crc)
            for counts in entry.read_header(data).relations:
                assert counts.schema_hash in self.registry
            self.entries.append(data)
        self.gate = max(self.gate, batch.gate_lsn)
        if batch.confirm_to is not None:
            assert batch.confirm_to.lsn > self.confirmed_to.lsn
            self.confirmed_to = batch.confirm_to

    def check_schemas(self, data: bytes) -> None:
        """Each row of an entry has the schema that the entry names for its table."""
        hashes = {c.relation_id: c.schema_hash for c in entry.read_header(data).relations}
        for message in messages_of(data):
            if message[0] in b"IUD":
                (size,) = struct.unpack_from(">I", message, 9)
                generation = int(message[13 : 13 + size])
                oid = pgoutput.relation_oid(message)
                types, relation = schema(oid, generation)
                assert self.registry[hashes[oid]] == entry.schema_record(relation, [types])

    def tick(self) -> None:
        """The repository commits what the replica may report."""
        for number in range(len(self.entries), self.committed, -1):
            header = entry.read_header(self.entries[number - 1])
            if header.ends_transaction and header.last_end_lsn <= self.gate:
                self.committed = number
                return

    def open_writer(self, *, seal: bool) -> None:
        """A new term: no unfinished tail; with `seal`, nothing that is not committed."""
        while len(self.entries) > self.committed and (
            seal or not entry.read_header(self.entries[-1]).ends_transaction
        ):
            self.entries.pop()

    @property
    def last_crc(self) -> int:
        return entry.read_header(self.entries[-1]).crc if self.entries else 0

    @property
    def last_end_lsn(self) -> int:
        return self._end(self.entries)

    @property
    def committed_end_lsn(self) -> int:
        return self._end(self.entries[: self.committed])

    @staticmethod
    def _end(entries: list[bytes]) -> int:
        return max((entry.read_header(data).last_end_lsn for data in entries), default=0)

    @property
    def last_commit_time(self) -> int:
        headers = map(entry.read_header, reversed(self.entries))
        return next((h.last_commit_time for h in headers if h.last_end_lsn), 0)

    def session(self, now: float, slot_confirmed: int = 0) -> core.CaptureState:
        """Capture's state at the start of a session."""
        return core.CaptureState(
            timeline=1,
            logged_lsn=self.last_end_lsn,
            committed_lsn=self.committed_end_lsn,
            previous_crc=self.last_crc,
            confirmed=self.confirmed_to,
            now=now,
            overlap=Overlap.of(
                self.last_end_lsn, self.last_commit_time, self.confirmed_to.lsn, slot_confirmed
            ),
        )

    def acknowledge(self, now: float) -> events.Acknowledged:
        return events.Acknowledged(
            now, self.last_end_lsn, self.committed_end_lsn, self.confirmed_to
        )

    def messages(self, entries: list[bytes] | None = None) -> list[bytes]:
        """Every message in the log."""
        return [m for e in (self.entries if entries is None else entries) for m in messages_of(e)]


def messages_of(data: bytes) -> list[bytes]:
    """The messages of one entry."""
    payload = entry.read_payload(data)
    found, at = [], 0
    while at < len(payload):
        (size,) = struct.unpack_from("<I", payload, at)
        found.append(bytes(payload[at + 4 : at + 4 + size]))
        at += 4 + size
    return found
