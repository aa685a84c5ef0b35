"""A walsender, a replica and a metadata repository in a few lines, to run capture's core against.

They do what the real ones promise and nothing more: the walsender sends every transaction that ends
above what its slot is confirmed to, and may forget a confirmation when it crashes; the replica keeps
what it acknowledged, a new writer loses an unfinished tail, and a seal may lose everything that was
not committed.
"""

import random
import struct
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field

from tests.support import pgoutput_messages as pg
from walsender_bridge.capture import core
from walsender_bridge.capture.overlap import Overlap
from walsender_bridge.change_log import entry
from walsender_bridge.wire import pgoutput

TABLES = (16385, 16390, 16400)
MOOD = 16500


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
    """A committed transaction: its commit record, and its row messages. No rows: nothing published."""

    commit_lsn: int
    xid: int
    rows: list[bytes]
    #: Before row i come these Relation and Type messages (the columns of a table changed).
    changes: dict[int, tuple[int, int]] = field(default_factory=dict)
    commit_time: int = pg.START_TIME

    @property
    def end_lsn(self) -> int:
        return self.commit_lsn + pg.COMMIT_RECORD

    @property
    def content(self) -> list[bytes]:
        """What the log must hold of it."""
        content = pg.transaction(self.commit_lsn, self.xid, self.rows, self.commit_time)
        return content if self.rows else []


class Server:
    """A source with one slot."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.transactions: list[Transaction] = []
        self.end = 0x1000
        self.confirmed = 0x1000
        self.confirmed_on_disk = 0x1000
        self.generations = dict.fromkeys(TABLES, 0)
        self.keepalives_empty = rng.random() < 0.5
        self.clock = [pg.START_TIME]

    def copy(self) -> "Server":
        """A copy of its data directory: the same history and slot up to here, as they are on disk."""
        other = copy(self)
        other.transactions = list(self.transactions)
        other.generations = dict(self.generations)
        other.confirmed = other.confirmed_on_disk
        return other

    def commit(self, *, largest: int = 6, width: int = 40) -> None:
        """One more transaction, some of them without a published change."""
        rng = self.rng
        self.end += rng.randrange(0, 400)
        rows: list[bytes] = []
        changes: dict[int, tuple[int, int]] = {}
        for i in range(rng.choice((0, 1, 2, largest))):
            oid = rng.choice(TABLES)
            if rng.random() < 0.1:
                self.generations[oid] += 1
                changes[i] = (oid, self.generations[oid])
            values = [b"%d" % rng.randrange(999), rng.randbytes(rng.randrange(width)), None]
            make = rng.choice((pg.insert, pg.update, pg.delete))
            rows.append(pg.truncate(oid) if rng.random() < 0.05 else make(oid, values))
        # No two moments are one, on this server or on a copy of it.
        self.clock[0] += rng.randrange(1, 5000)
        xid = 700 + len(self.transactions)
        one = Transaction(self.end, xid, rows, changes, self.clock[0])
        self.transactions.append(one)
        self.end = one.end_lsn

    def crash(self) -> None:
        """What the slot was told since its last write to disk is forgotten."""
        self.confirmed = self.confirmed_on_disk

    def save(self) -> None:
        self.confirmed_on_disk = self.confirmed

    def stream(self) -> Iterator[bytes]:
        """Payloads of one session, without end: keepalives when there is nothing else."""
        return self._stream(self.confirmed)

    def _stream(self, sent: int) -> Iterator[bytes]:
        known: dict[int, int] = {}
        generations = dict.fromkeys(TABLES, 0)
        at = 0
        while True:
            if at == len(self.transactions):
                yield keepalive(self.end, reply=self.rng.random() < 0.1)
                continue
            one = self.transactions[at]
            at += 1
            send = one.commit_lsn >= sent
            if send and (one.rows or not self.keepalives_empty):
                yield xlog(pg.begin(one.commit_lsn, one.xid, one.commit_time), one.commit_lsn)
            for i, row in enumerate(one.rows):
                if i in one.changes:
                    oid, generation = one.changes[i]
                    generations[oid] = generation
                    known.pop(oid, None)
                if not send:
                    continue
                for oid in _relations(row):
                    if known.get(oid) != generations[oid]:
                        known[oid] = generations[oid]
                        yield from map(xlog, schema(oid, generations[oid]))
                yield xlog(row)
                if self.rng.random() < 0.05:
                    yield keepalive(one.commit_lsn - 1)
            if send and (one.rows or not self.keepalives_empty):
                yield xlog(pg.commit(one.commit_lsn, one.end_lsn, one.commit_time))


def _relations(row: bytes) -> tuple[int, ...]:
    if row[0] == pgoutput.TRUNCATE:
        return struct.unpack_from(">I", row, 6)
    return (pgoutput.relation_oid(row),)


@dataclass
class Replica:
    """The log's only replica, with the repository that commits it."""

    confirmed_to: tuple[int, int] = (1, 0x1000)
    entries: list[bytes] = field(default_factory=list)
    committed: int = 0
    gate: int = 0
    registry: dict[bytes, bytes] = field(default_factory=dict)

    def append(self, batch: core.Append) -> None:
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
            assert batch.confirm_to[1] > self.confirmed_to[1]
            self.confirmed_to = batch.confirm_to

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

    def session(self, now: float, slot_confirmed: int = 0) -> core.State:
        """Capture's state at the start of a session."""
        return core.State(
            timeline=1,
            logged_lsn=self.last_end_lsn,
            committed_lsn=self.committed_end_lsn,
            previous_crc=self.last_crc,
            confirmed=self.confirmed_to,
            now=now,
            overlap=Overlap.of(
                self.last_end_lsn, self.last_commit_time, self.confirmed_to[1], slot_confirmed
            ),
        )

    def acknowledge(self, now: float) -> core.Acknowledged:
        return core.Acknowledged(now, self.last_end_lsn, self.committed_end_lsn, self.confirmed_to)

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
