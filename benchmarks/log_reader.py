"""The content of a change log, in a form that can be compared with another reader's output."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

from walsender_bridge.change_log.client import (
    LogClient,
    LogEntry,
    read_header,
    read_payload,
    split_schema_record,
)
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.postgres.protocol import pgoutput


@dataclass(frozen=True)
class Content:
    """Every message of a log: changes by table and operation, and a checksum of their bytes in order."""

    rows: dict[str, int]
    messages: int
    raw_bytes: int
    stored_bytes: int
    digest: str


def entries(log: str, stream: str) -> Iterator[LogEntry]:
    """All committed entries."""
    with LogClient(log) as client:
        cut = client.status().streams[stream]
    with StreamReader.of(cut) as reader:
        yield from reader.read(cut.low_offset, cut.end_offset)


def schemas(log: str, stream: str) -> dict[bytes, bytes]:
    """Every schema record that the entries name, by its hash."""
    hashes = {r.schema_hash for e in entries(log, stream) for r in read_header(e.data).relations}
    with LogClient(log) as client:
        cut = client.status().streams[stream]
    with StreamReader.of(cut) as reader:
        return reader.schemas(hashes)


def payloads(log: str, stream: str) -> Iterator[bytes]:
    """(u32 little-endian length + message) repeated, entry after entry."""
    for entry in entries(log, stream):
        yield read_payload(entry.data)


def content(log: str, stream: str) -> Content:
    """Read the whole log once."""
    rows: Counter[str] = Counter()
    names = {h: _name(record) for h, record in schemas(log, stream).items()}
    messages = raw = stored = 0
    digest = sha256()
    for entry in entries(log, stream):
        header = read_header(entry.data)
        for r in header.relations:
            name = names[r.schema_hash]
            counts = (("I", r.inserts), ("U", r.updates), ("D", r.deletes))
            rows.update({f"{name} {op}": count for op, count in counts if count})
        payload = read_payload(entry.data, header)
        messages += header.message_count
        raw += len(payload)
        stored += len(entry.data)
        digest.update(payload)
    return Content(dict(sorted(rows.items())), messages, raw, stored, digest.hexdigest())


def _name(record: bytes) -> str:
    return pgoutput.parse_relation(split_schema_record(record)[0]).full_name
