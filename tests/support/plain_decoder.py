"""The straightforward decoder: one message, one row, one value at a time, with Python's own types.

It shares nothing with `spark_consumers.decode.entries` but the wire format's documentation; that is what makes
it worth comparing with, in results and in speed.
"""

import datetime as dt
import decimal
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from walsender_bridge.change_log.client import LogEntry
from walsender_bridge.change_log.entry import read_header, read_payload, split_schema_record
from walsender_bridge.postgres.protocol.pgoutput import POSTGRES_EPOCH, Relation, parse_relation

UNCHANGED = "(unchanged)"


@dataclass
class Change:
    """One change of one relation; values are None (NULL), UNCHANGED or Python's."""

    relation: str
    op: str
    commit_lsn: int
    xid: int
    commit_time: int
    offset: int
    version: int
    sequence: int
    new: list[Any] | None = None
    old: list[Any] | None = None
    old_kind: int = 0


@dataclass
class PlainDecoder:
    """Decodes entry after entry; `schemas` gives a schema record for its hash."""

    schemas: Callable[[bytes], bytes]
    changes: list[Change] = field(default_factory=list)
    _transaction: tuple[int, int, int] = (0, 0, 0)

    def decode(self, entries: Iterable[LogEntry]) -> list[Change]:
        for entry in entries:
            self._entry(entry)
        return self.changes

    def _entry(self, entry: LogEntry) -> None:
        header = read_header(entry.data)
        relations = {}
        for counts in header.relations:
            first, *types = split_schema_record(self.schemas(counts.schema_hash))
            relations[counts.relation_id] = parse_relation(first, tuple(types))
        payload = read_payload(entry.data)
        at = sequence = 0
        while at < len(payload):
            end = at + 4 + int.from_bytes(payload[at : at + 4], "little")
            self._message(payload[at + 4 : end], relations, (entry.offset, entry.version, sequence))
            at, sequence = end, sequence + 1

    def _message(
        self, m: bytes, relations: dict[int, Relation], place: tuple[int, int, int]
    ) -> None:
        kind = chr(m[0])
        if kind == "B":
            lsn, moment, xid = struct.unpack(">QqI", m[1:])
            self._transaction = (lsn, xid, moment + POSTGRES_EPOCH)
        elif kind == "T":
            for oid in struct.unpack(f">{int.from_bytes(m[1:5], 'big')}I", m[6:]):
                name = relations[oid].full_name
                self.changes.append(Change(name, kind, *self._transaction, *place))
        elif kind in "IUD":
            relation = relations[int.from_bytes(m[1:5], "big")]
            change = Change(relation.full_name, kind, *self._transaction, *place)
            at = 5
            if m[at] in b"KO":
                change.old_kind = m[at]
                change.old, at = _row(m, at + 1, relation)
            if kind != "D":
                change.new, at = _row(m, at + 1, relation)
            self.changes.append(change)


def _row(m: bytes, at: int, relation: Relation) -> tuple[list[Any], int]:
    count = int.from_bytes(m[at : at + 2], "big")
    at += 2
    row: list[Any] = []
    for i in range(count):
        kind = chr(m[at])
        if kind == "t":
            end = at + 5 + int.from_bytes(m[at + 1 : at + 5], "big")
            column = relation.columns[i]
            row.append(value(m[at + 5 : end].decode(), column.type_oid, column.typmod))
            at = end
        else:
            row.append(None if kind == "n" else UNCHANGED)
            at += 1
    return row, at


def value(text: str, oid: int, typmod: int) -> Any:
    """PostgreSQL's text as Python's value."""
    if oid == 16:
        return text == "t"
    if oid in (20, 21, 23):
        return int(text)
    if oid in (700, 701):
        number = float(text)
        return struct.unpack("f", struct.pack("f", number))[0] if oid == 700 else number
    if oid == 17:
        return bytes.fromhex(text[2:])
    if oid == 1700 and typmod >= 4:
        return decimal.Decimal(text)
    if oid == 1082:
        return dt.date.fromisoformat(text)
    if oid in (1114, 1184):
        return dt.datetime.fromisoformat(text)
    if oid in (1005, 1007, 1016):
        return [None if i is None else int(i) for i in array(text)]
    if oid in (1009, 1015):
        return array(text)
    return text


def array(text: str) -> list[str | None]:
    """The elements of an array of one dimension."""
    found: list[str | None] = []
    item, quoted, at, inside = "", False, 1, False
    if text == "{}":
        return found
    while at < len(text):
        c = text[at]
        if inside and c == "\\":
            at += 1
            item += text[at]
        elif c == '"':
            inside, quoted = not inside, True
        elif not inside and c in ",}":
            found.append(None if item == "NULL" and not quoted else item)
            item, quoted = "", False
        else:
            item += c
        at += 1
    return found
