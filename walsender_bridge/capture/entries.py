"""Builds entries from messages: what is buffered, where it is cut, and which schema each relation has in it.

Invariant: each entry can be decoded by itself. It refers to one schema of each relation, and the record of that schema
is written to the log before the entry or with it.
"""

from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from walsender_bridge.change_log.entry import (
    NAMED_OTHERWISE,
    PartitionRow,
    build_entry,
    read_header,
    schema_hash,
    schema_record,
)
from walsender_bridge.postgres.protocol import pgoutput
from walsender_bridge.postgres.protocol.lsn import Lsn

#: Bytes of an entry's messages (with their length prefixes) at which it is cut.
ENTRY_BYTES: Final = 1 << 20
#: Bytes of a message's length prefix.
PREFIX: Final = 4
_ROWS: Final = frozenset((pgoutput.INSERT, pgoutput.UPDATE, pgoutput.DELETE))
_BEFORE_ROWS: Final = frozenset((pgoutput.BEGIN, pgoutput.ORIGIN))


@dataclass(slots=True, kw_only=True)
class Entries:
    """The entries of a session.

    `logged_lsn` is the end LSN of the last transaction that ends in an entry, or (at the start) that
    was found in the log; `previous_crc` is the checksum of the last entry.
    """

    timeline: int
    logged_lsn: Lsn
    previous_crc: int
    #: Monotonic seconds.
    now: float

    #: End LSN of the last transaction that was received completely.
    received_lsn: Lsn = field(init=False)
    buffer: list[bytes] = field(default_factory=list)
    #: Bytes of the buffer, prefixes included. A loop that fills the buffer keeps this in a local variable
    #: (`buffered`) and stores it back before calling a method that cuts.
    buffer_bytes: int = 0
    #: Messages of the buffer up to the end of its last complete transaction, and their bytes.
    whole: int = 0
    whole_bytes: int = 0
    #: When the first message of the buffer arrived, or when the entry before it was cut.
    first_at: float = 0.0
    #: Number of transactions completed.
    transactions: int = 0

    types: dict[int, bytes] = field(default_factory=dict)
    #: The current schema of each relation, by OID: its hash and its record.
    schema_hashes: dict[int, bytes] = field(default_factory=dict)
    records: dict[int, bytes] = field(default_factory=dict)
    #: The last Relation message, and its place in the stream.
    described: tuple[pgoutput.Relation, tuple[int, int]] | None = None
    #: Partitions described right after the root through which their rows are published: the buffer index of the next
    #: message, the partition's OID (or `NAMED_OTHERWISE`), the root's OID.
    partitions: list[tuple[int, int, int]] = field(default_factory=list)
    new_schemas: list[bytes] = field(default_factory=list)
    new_entries: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.received_lsn = self.logged_lsn

    def room(self, buffered: int, size: int) -> int:
        """Cut entries until `size` more bytes fit into the buffer, or it is empty; return the bytes still buffered."""
        self.buffer_bytes = buffered
        while self.buffer and self.buffer_bytes + size > ENTRY_BYTES:
            self.cut()
        return self.buffer_bytes

    def end_transaction(self, end_lsn: Lsn, buffered: int) -> None:
        """Note that the buffer, of `buffered` bytes, ends with a complete transaction."""
        self.received_lsn = end_lsn
        self.whole, self.whole_bytes = len(self.buffer), buffered
        self.transactions += 1

    def relation(self, message: bytes) -> int:
        """Process a Relation message that follows its Type messages; return the relation's OID.

        For a partition published through its root, pgoutput describes the root, then the partition, and then sends
        a row of the root: the only indication of which partition has rows. Raises `MalformedMessageError`.
        """
        relation = pgoutput.parse_relation(message)
        own_types = {c.type_oid for c in relation.columns} & self.types.keys()
        record = schema_record(message, [self.types[oid] for oid in own_types])
        before = self.described
        adjacent = before is not None and before[1] == self._place()
        self.describe(relation.oid, record)
        if before is not None and adjacent and before[0].oid != relation.oid:
            root = before[0]
            oids = [relation.oid, NAMED_OTHERWISE][: 1 + _is_named_otherwise(root, relation)]
            self.partitions += [(len(self.buffer), oid, root.oid) for oid in oids]
        self.described = relation, self._place()
        return relation.oid

    def _place(self) -> tuple[int, int]:
        """The place in the stream: it changes with each buffered message and each entry."""
        return self.previous_crc, len(self.buffer)

    def describe(self, oid: int, record: bytes) -> None:
        """Set the relation's schema from here on."""
        digest = schema_hash(record)
        known = self.schema_hashes.get(oid)
        if known == digest:
            return
        if known is not None:
            self.cut_all()
        self.schema_hashes[oid] = digest
        self.records[oid] = record
        # Even a schema that it had before: the log's newest schema of a relation is the one sent last.
        self.new_schemas.append(record)

    def cut(self) -> None:
        """Cut one entry: the complete transactions in the buffer, or everything in it if there are none."""
        count = self.whole or len(self.buffer)
        entry = build_entry(
            self.buffer[:count],
            timeline=self.timeline,
            previous_crc=self.previous_crc,
            schema_hashes=self.schema_hashes,
            partitions=self._begun(count) if self.partitions else (),
        )
        if self.whole:
            self.logged_lsn = self.received_lsn
            self.buffer_bytes -= self.whole_bytes
        else:
            self.buffer_bytes = 0
        # In place, since the loop over the payloads has a reference to this list.
        del self.buffer[:count]
        self.whole = self.whole_bytes = 0
        self.first_at = self.now
        self.previous_crc = read_header(entry).crc
        self.new_entries.append(entry)

    def _begun(self, count: int) -> list[PartitionRow]:
        """The partitions with rows among the first `count` messages of the buffer; the others stay pending."""
        found: list[PartitionRow] = []
        waiting = []
        for at, oid, table in self.partitions:
            rest = enumerate(islice(self.buffer, at, count), at)
            number, row = next((n_m for n_m in rest if n_m[1][0] not in _BEFORE_ROWS), (0, b""))
            if not row:
                waiting.append((max(at - count, 0), oid, table))
            elif row[0] in _ROWS and pgoutput.relation_oid(row) == table:
                found.append(PartitionRow(oid, self.schema_hashes[table], number))
        self.partitions = waiting
        return found

    def cut_all(self) -> None:
        """Cut everything in the buffer into entries."""
        while self.buffer:
            self.cut()


def _is_named_otherwise(root: pgoutput.Relation, partition: pgoutput.Relation) -> bool:
    """Whether the partition's replica identity lacks a column of the root's: an UPDATE of that column sends no old key.

    A partition without a replica identity has no updates or deletes, since the server refuses them.
    """
    key = {column.name for column in root.columns if column.is_key}
    has_key = any(column.is_key for column in partition.columns)
    return has_key and any(c.name in key and not c.is_key for c in partition.columns)
