"""Entries of a change log without a server: tables of any types, rows of any kind, cut anywhere."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import strategies as st

from tests.support import pgoutput_messages as pm
from walsender_bridge.change_log.client import LogEntry
from walsender_bridge.change_log.entry import (
    Codec,
    build_entry,
    read_header,
    schema_hash,
    schema_record,
)
from walsender_bridge.errors import CorruptError

UNCHANGED = object()

#: (type OID, typmod, a text for it) that both decoders have a typed value for.
TYPED: dict[tuple[int, int], st.SearchStrategy[str]] = {
    (16, -1): st.sampled_from(["t", "f"]),
    (21, -1): st.integers(-(2**15), 2**15 - 1).map(str),
    (23, -1): st.integers(-(2**31), 2**31 - 1).map(str),
    (20, -1): st.integers(-(2**63), 2**63 - 1).map(str),
    (701, -1): st.floats(allow_nan=False, allow_infinity=False).map(repr),
    (25, -1): st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
    (1043, 24): st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=20),
    (17, -1): st.binary(max_size=12).map(lambda b: f"\\x{b.hex()}"),
    (1082, -1): st.dates().map(str),
    (1114, -1): st.datetimes().map(str),
    (1184, -1): st.datetimes().map(lambda d: f"{d}+00"),
    (1700, (12 << 16 | 3) + 4): st.integers(-(10**12) + 1, 10**12 - 1).map(
        lambda n: f"{'-' if n < 0 else ''}{abs(n) // 1000}.{abs(n) % 1000:03}"
    ),
    (1700, -1): st.integers().map(str),
    (2950, -1): st.uuids().map(str),
    (1007, -1): st.lists(st.none() | st.integers(-(2**31), 2**31 - 1)).map(
        lambda items: "{" + ",".join("NULL" if i is None else str(i) for i in items) + "}"
    ),
    (1009, -1): st.lists(
        st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6),
        max_size=4,
    ).map(lambda items: "{" + ",".join(map(_element, items)) + "}"),
    (99999, -1): st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9),
}


def _element(item: str | None) -> str:
    """An element as PostgreSQL writes it (`array_out`)."""
    if item is None:
        return "NULL"
    if item and item.upper() != "NULL" and not set(item) & set('{}",\\ \t\n\r\v\f'):
        return item
    escaped = item.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


@dataclass(frozen=True)
class Table:
    """A table: its columns are (name, type OID, typmod); the first is its key."""

    oid: int
    name: str
    columns: tuple[tuple[str, int, int], ...]
    identity: str = "d"
    schema: str = "public"

    @property
    def record(self) -> bytes:
        body = b"".join(
            bytes([i == 0 or self.identity == "f"])
            + name.encode()
            + b"\0"
            + struct.pack(">Ii", type_oid, typmod)
            for i, (name, type_oid, typmod) in enumerate(self.columns)
        )
        head = struct.pack(">cI", b"R", self.oid)
        names = self.schema.encode() + b"\0" + self.name.encode() + b"\0" + self.identity.encode()
        types = [pm.type_message(99999, "mood")] if self._has_mood() else []
        return schema_record(head + names + struct.pack(">H", len(self.columns)) + body, types)

    def _has_mood(self) -> bool:
        return any(type_oid == 99999 for _, type_oid, _ in self.columns)


def row(values: Sequence[object]) -> bytes:
    """A tuple: texts, None for NULL, `UNCHANGED`."""
    parts = [struct.pack(">H", len(values))]
    for value in values:
        if value is None:
            parts.append(b"n")
        elif value is UNCHANGED:
            parts.append(b"u")
        else:
            raw = value if isinstance(value, bytes) else str(value).encode()
            parts.append(b"t" + struct.pack(">I", len(raw)) + raw)
    return b"".join(parts)


def insert(table: Table, new: Sequence[object]) -> bytes:
    return struct.pack(">cI", b"I", table.oid) + b"N" + row(new)


def update(
    table: Table, new: Sequence[object], old: Sequence[object] | None = None, kind: bytes = b"K"
) -> bytes:
    before = b"" if old is None else kind + row(old)
    return struct.pack(">cI", b"U", table.oid) + before + b"N" + row(new)


def delete(table: Table, old: Sequence[object], kind: bytes = b"K") -> bytes:
    return struct.pack(">cI", b"D", table.oid) + kind + row(old)


@dataclass
class Entries:
    """A log in memory: entries with a version each, and the schema registry."""

    entries: list[LogEntry] = field(default_factory=list)
    registry: dict[bytes, bytes] = field(default_factory=dict)

    def schemas(self, digest: bytes) -> bytes:
        if digest not in self.registry:
            raise CorruptError(f"no schema {digest.hex()}")
        return self.registry[digest]

    def add(
        self, messages: Sequence[bytes], tables: Iterable[Table], codec: Codec = Codec.ZSTD
    ) -> LogEntry:
        hashes = {}
        for table in tables:
            digest = schema_hash(table.record)
            self.registry[digest] = table.record
            hashes[table.oid] = digest
        previous = read_header(self.entries[-1].data).crc if self.entries else 0
        data = build_entry(
            messages, timeline=1, previous_crc=previous, schema_hashes=hashes, codec=codec
        )
        offset = len(self.entries) + 1
        entry = LogEntry(offset, offset * 10, offset, data)
        self.entries.append(entry)
        return entry


def cut(messages: Sequence[bytes], tables: Iterable[Table], bounds: Iterable[int] = ()) -> Entries:
    """The messages as entries, cut before each of these message numbers."""
    log = Entries()
    places = sorted({0, len(messages), *(b for b in bounds if 0 < b < len(messages))})
    known = list(tables)
    for first, last in pairwise(places):
        log.add(messages[first:last], known)
    return log


def transactions(
    groups: Iterable[Sequence[bytes]], start: int = 0x1000, xid: int = 700
) -> Iterator[bytes]:
    """Each group of changes in a transaction of its own, LSNs and xids rising."""
    for number, group in enumerate(groups):
        yield from pm.transaction(start + number * 0x1000, xid + number, group)


@st.composite
def tables(draw: st.DrawFn, oid: int) -> Table:
    """A table of up to six columns, under either of the usual replica identities."""
    kinds = draw(st.lists(st.sampled_from(sorted(TYPED)), min_size=1, max_size=6))
    columns = tuple((f"c{i}", *kind) for i, kind in enumerate(kinds))
    return Table(oid, f"t{oid}", columns, draw(st.sampled_from("df")))


@st.composite
def changes(draw: st.DrawFn, table: Table) -> bytes:
    """A change of the table as a server would send it."""

    def values() -> list[object]:
        return [draw(st.none() | TYPED[t, m]) for _, t, m in table.columns]

    new, old = values(), values()
    kind = b"O" if table.identity == "f" else b"K"
    if kind == b"K":
        old = [old[0], *(None for _ in old[1:])]
    match draw(st.sampled_from("IIUUKDT")):
        case "I":
            return insert(table, new)
        case "U":
            toasted = [UNCHANGED if draw(st.booleans()) else value for value in new]
            return update(table, toasted)
        case "K":
            return update(table, new, old, kind)
        case "D":
            return delete(table, old, kind)
        case _:
            return pm.truncate(table.oid)


@st.composite
def logs(draw: st.DrawFn) -> Entries:
    """A log of some tables, cut anywhere."""
    known = [draw(tables(oid)) for oid in draw(st.sets(st.integers(1, 9), min_size=1, max_size=3))]
    messages = list(
        transactions(
            [
                [
                    draw(changes(draw(st.sampled_from(known))))
                    for _ in range(draw(st.integers(0, 8)))
                ]
                for _ in range(draw(st.integers(1, 6)))
            ]
        )
    )
    return cut(messages, known, draw(st.sets(st.integers(1, len(messages)), max_size=5)))
