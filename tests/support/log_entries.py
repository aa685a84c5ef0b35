"""Entries of a stream as capture would write them, one behind the other."""

import random
from collections.abc import Iterator, Sequence

from tests.support import pgoutput_messages as pg
from walsender_bridge.change_log import entry
from walsender_bridge.change_log.append_writer import AppendWriter
from walsender_bridge.change_log.client import ReplicaClient
from walsender_bridge.change_log.protocol import ReplicaStatus
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.storage.store import StoredEntry
from walsender_bridge.postgres.protocol.lsn import WalPosition

ACCOUNTS, AUDIT = 16385, 16390
SCHEMAS = {
    ACCOUNTS: entry.schema_record(pg.relation(ACCOUNTS, "accounts", [("id", 20), ("v", 25)])),
    AUDIT: entry.schema_record(pg.relation(AUDIT, "audit", [("note", 25)])),
}
HASHES = {oid: entry.schema_hash(record) for oid, record in SCHEMAS.items()}


def batches(
    replica: HostedReplica, start: int, stop: int, relations: Sequence[str] | None = None
) -> Iterator[list[StoredEntry]]:
    """The committed entries [start, stop), batch by batch."""
    while True:
        batch, start = replica.read(start, stop, relations)
        yield batch
        if start >= stop:
            return


class EntryMaker:
    """Makes entries that continue a log. `choose` draws the bytes of the rows."""

    def __init__(self, seed: int = 1, *, timeline: int = 1) -> None:
        self.choose = random.Random(seed)
        self.timeline = timeline
        self.crc = 0
        self.lsn = 0x1000
        self.xid = 700
        self.time = pg.START_TIME

    def follow(self, status: ReplicaStatus) -> None:
        """Go on where the log ends."""
        self.crc = status.last_crc
        self.lsn = max(status.last_end_lsn, 0x1000)

    def _build(self, messages: list[bytes]) -> bytes:
        data = entry.build_entry(
            messages,
            timeline=self.timeline,
            previous_crc=self.crc,
            schema_hashes=HASHES,
            codec=entry.Codec.NONE,
        )
        self.crc = entry.read_header(data).crc
        return data

    def _rows(self, count: int, size: int, table: int) -> list[bytes]:
        return [pg.insert(table, [self.choose.randbytes(size)]) for _ in range(count)]

    def _next(self) -> int:
        self.xid += 1
        self.time += 1000
        self.lsn += 0x100
        return self.lsn

    def whole(
        self, transactions: int = 1, *, rows: int = 1, size: int = 20, table: int = ACCOUNTS
    ) -> bytes:
        """An entry of whole transactions; the last one's end LSN is `end_lsn`."""
        messages: list[bytes] = []
        for _ in range(transactions):
            lsn = self._next()
            messages += pg.transaction(lsn, self.xid, self._rows(rows, size, table), self.time)
        return self._build(messages)

    @property
    def end_lsn(self) -> int:
        """Where the last transaction ends."""
        return self.lsn + pg.COMMIT_RECORD

    def start(self, *, rows: int = 1, size: int = 20, table: int = ACCOUNTS) -> bytes:
        """The first entry of a long transaction."""
        lsn = self._next()
        return self._build([pg.begin(lsn, self.xid, self.time), *self._rows(rows, size, table)])

    def middle(self, *, rows: int = 1, size: int = 20, table: int = ACCOUNTS) -> bytes:
        """An entry inside of it."""
        return self._build(self._rows(rows, size, table))

    def end(self, *, rows: int = 1, size: int = 20, table: int = ACCOUNTS) -> bytes:
        """Its last entry."""
        finish = pg.commit(self.lsn, self.end_lsn, self.time)
        return self._build([*self._rows(rows, size, table), finish])


def tell(address: str, stream: str, position: WalPosition, system_id: int) -> None:
    """What a writer was about to confirm to the slot reaches the replica of this log server alone."""
    with ReplicaClient(address) as replica:
        term = replica.stream_status(stream).term
        with append_to(replica, stream, term) as writer:
            writer.send([], confirm_to=position, system_id=system_id)
            assert writer.next_ack(20) is not None


def append_to(replica: ReplicaClient, stream: str, term: int) -> AppendWriter:
    """A writer of this log server's replica alone."""
    tls = replica._connection.tls
    return AppendWriter(replica.address, stream, term, replica.timeout, tls=tls)
