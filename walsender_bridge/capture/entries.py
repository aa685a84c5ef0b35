"""Messages become entries: what is buffered, where it is cut, and which schema each relation has in it.

Invariant: an entry decodes alone. It holds one schema of each relation, and the record of that schema goes
to the log before it or with it.
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

#: Bytes of an entry's messages (with their length prefixes) at which it is cut.
ENTRY_BYTES: Final = 1 << 20
#: Bytes of a message's length prefix.
PREFIX: Final = 4
_ROWS: Final = frozenset((pgoutput.INSERT, pgoutput.UPDATE, pgoutput.DELETE))
_BEFORE_ROWS: Final = frozenset((pgoutput.BEGIN, pgoutput.ORIGIN))


@dataclass(slots=True, kw_only=True)
class Entries:
    """The entries of a session.

    `logged_lsn` is the end LSN of the last transaction that is whole in an entry, or (at the start) that
    was found in the log; `previous_crc` the checksum of the last entry.
    """

    timeline: int
    logged_lsn: int
    previous_crc: int
    #: Monotonic seconds.
    now: float

    #: End LSN of the last transaction that was received whole.
    received_lsn: int = field(init=False)
    buffer: list[bytes] = field(default_factory=list)
    #: Bytes of the buffer, prefixes included. Whoever fills the buffer in a loop keeps it in a local name
    #: (`buffered`) and puts it back before calling what cuts.
    buffer_bytes: int = 0
    #: Messages of the buffer up to the end of its last whole transaction, and their bytes.
    whole: int = 0
    whole_bytes: int = 0
    #: When the first message of the buffer came, or when something was cut away before it.
    first_at: float = 0.0
    #: Transactions that became whole.
    transactions: int = 0

    types: dict[int, bytes] = field(default_factory=dict)
    #: What each relation has now, by OID: the schema's hash, and the schema.
    schema_hashes: dict[int, bytes] = field(default_factory=dict)
    records: dict[int, bytes] = field(default_factory=dict)
    #: The last Relation message, and where it came.
    described: tuple[pgoutput.Relation, tuple[int, int]] | None = None
    #: Partitions that were described behind the table as which their rows come: where the next message will be in
    #: the buffer, the partition's OID (or `NAMED_OTHERWISE`), the table's.
    partitions: list[tuple[int, int, int]] = field(default_factory=list)
    new_schemas: list[bytes] = field(default_factory=list)
    new_entries: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.received_lsn = self.logged_lsn

    def room(self, buffered: int, size: int) -> int:
        """Cut the buffer (of `buffered` bytes) until `size` more fit, or it is empty; the bytes still buffered."""
        self.buffer_bytes = buffered
        while self.buffer and self.buffer_bytes + size > ENTRY_BYTES:
            self.cut()
        return self.buffer_bytes

    def end_transaction(self, end_lsn: int, buffered: int) -> None:
        """The buffer, of `buffered` bytes, ends with a whole transaction."""
        self.received_lsn = end_lsn
        self.whole, self.whole_bytes = len(self.buffer), buffered
        self.transactions += 1

    def relation(self, message: bytes) -> int:
        """Follow a Relation message, behind its Type messages; the relation's OID.

        Where a partition is published through its root, pgoutput describes the root, the partition, and then sends
        a row of the root: the only sign of which partition has rows. Raises `MalformedMessageError`.
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
        """Another one after each message that is kept, and each entry."""
        return self.previous_crc, len(self.buffer)

    def describe(self, oid: int, record: bytes) -> None:
        """From here on the relation has the schema of this record."""
        digest = schema_hash(record)
        known = self.schema_hashes.get(oid)
        if known == digest:
            return
        if known is not None:
            self.cut_all()
        self.schema_hashes[oid] = digest
        self.records[oid] = record
        # Also one that it had before: the log's newest schema of a relation is the last that was sent.
        self.new_schemas.append(record)

    def cut(self) -> None:
        """Make one entry: of the whole transactions in the buffer, or else of everything in it."""
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
        # In place: the loop over the payloads holds this list.
        del self.buffer[:count]
        self.whole = self.whole_bytes = 0
        self.first_at = self.now
        self.previous_crc = read_header(entry).crc
        self.new_entries.append(entry)

    def _begun(self, count: int) -> list[PartitionRow]:
        """The partitions of which rows are among the first `count` messages of the buffer; the others wait."""
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
        """Make entries of everything in the buffer."""
        while self.buffer:
            self.cut()


def _is_named_otherwise(root: pgoutput.Relation, partition: pgoutput.Relation) -> bool:
    """Whether the partition's replica identity lacks a column of the root's: an UPDATE of that one has no old key.

    Without any identity it has no updates and deletes: the server refuses them.
    """
    key = {column.name for column in root.columns if column.is_key}
    has_key = any(column.is_key for column in partition.columns)
    return has_key and any(c.name in key and not c.is_key for c in partition.columns)
