"""The transactions in a run of entries, to be shown one at a time: `tuskline log tail`. Pure, except for the schemas.

Entries come in order, from the beginning of a transaction on. Of a transaction only its counts are remembered, so memory is
that of one entry however long a transaction is; its rows come out before it does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from walsender_bridge.change_log.entry import (
    EntryHeader,
    EntryKind,
    check,
    read_payload,
    split_messages,
    split_schema_record,
)
from walsender_bridge.errors import MalformedMessageError
from walsender_bridge.postgres.protocol import pgoutput
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.pgoutput import Relation
from walsender_bridge.postgres.protocol.pgoutput_rows import RowChange, parse_row

OPERATIONS: Final[Mapping[int, str]] = {
    pgoutput.INSERT: "insert",
    pgoutput.UPDATE: "update",
    pgoutput.DELETE: "delete",
    pgoutput.TRUNCATE: "truncate",
}


@dataclass(frozen=True, slots=True)
class LoggedTransaction:
    """A transaction. `offset`: of the entry that ends it. `counts`: by relation and operation."""

    version: int
    offset: int
    xid: int
    end_lsn: Lsn
    commit_time: int
    timeline: int
    counts: Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class LoggedRow:
    """A row of the transaction that comes out next."""

    xid: int
    relation: Relation
    change: RowChange


@dataclass(frozen=True, slots=True)
class Restart:
    """Behind this entry is another history of the source."""

    version: int
    offset: int


@dataclass(slots=True)
class _Open:
    """The transaction that has begun."""

    xid: int
    counts: dict[str, dict[str, int]] = field(default_factory=dict)


class TransactionReader:
    """See the module. `schemas`: the schema records of these hashes.

    `relations` ("schema.table"): only these, and only transactions that change one of them; None: all. `rows`: rows as well.
    """

    def __init__(
        self,
        schemas: Callable[[Iterable[bytes]], Mapping[bytes, bytes]],
        *,
        relations: frozenset[str] | None = None,
        rows: bool = False,
    ) -> None:
        self._schemas = schemas
        self._relations = relations
        self._rows = rows
        self._known: dict[bytes, Relation] = {}
        self._open: _Open | None = None

    def read(
        self, offset: int, version: int, data: bytes | memoryview
    ) -> Iterator[LoggedRow | LoggedTransaction | Restart]:
        """What the next entry contains and ends. Raises `CorruptError`, `MalformedMessageError`."""
        header = check(data)
        if header.kind == EntryKind.RESTART:
            self._open = None
            yield Restart(version, offset)
            return
        relations = self._of(header)
        for message in split_messages(read_payload(data, header)):
            kind = message[0]
            if kind == pgoutput.BEGIN:
                self._open = _Open(pgoutput.parse_begin(message).xid)
            elif self._open is None:
                raise MalformedMessageError(
                    "a message is in no transaction", where=f"entry {offset}"
                )
            elif kind in OPERATIONS:
                yield from self._change(self._open, message, relations)
            elif kind == pgoutput.COMMIT:
                done, self._open = self._open, None
                commit = pgoutput.parse_commit(message)
                if done.counts or self._relations is None:
                    at = (version, offset, done.xid, commit.end_lsn, commit.commit_time)
                    yield LoggedTransaction(*at, header.timeline, done.counts)

    def _of(self, header: EntryHeader) -> dict[int, Relation]:
        """The relations of an entry, by OID."""
        wanted = {each.relation_id: each.schema_hash for each in header.relations}
        missing = [digest for digest in wanted.values() if digest not in self._known]
        if missing:
            for digest, record in self._schemas(missing).items():
                relation, *types = split_schema_record(record)
                self._known[digest] = pgoutput.parse_relation(relation, tuple(types))
        return {oid: self._known[digest] for oid, digest in wanted.items()}

    def _change(
        self, transaction: _Open, message: bytes, relations: Mapping[int, Relation]
    ) -> Iterator[LoggedRow]:
        kind = message[0]
        oids = (
            _truncated(message) if kind == pgoutput.TRUNCATE else [pgoutput.relation_oid(message)]
        )
        for oid in oids:
            relation = relations.get(oid)
            if relation is None:
                raise MalformedMessageError(f"relation {oid} is not in the entry's header")
            name = relation.full_name
            if self._relations is not None and name not in self._relations:
                continue
            counts = transaction.counts.setdefault(name, {})
            operation = OPERATIONS[kind]
            counts[operation] = counts.get(operation, 0) + 1
            if self._rows and kind != pgoutput.TRUNCATE:
                yield LoggedRow(transaction.xid, relation, parse_row(message))


def _truncated(message: bytes) -> list[int]:
    numbers = message[6:]
    return [int.from_bytes(numbers[at : at + 4], "big") for at in range(0, len(numbers), 4)]
