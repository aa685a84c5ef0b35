"""What atheris (libFuzzer) runs: bytes as a run of pgoutput messages, through framing, entry and decoder.

python -m tests.fuzz.pgoutput_target SCHEMAS [libFuzzer's options] CORPUS...

An input is a series of messages, each behind its length (2 bytes, little-endian). SCHEMAS is a file of JSON: by a
relation's OID the schema record of the log, in hex; what the input describes itself comes on top. Whatever the bytes are,
each stage has to take them or to refuse them by one of our errors; anything else is a finding, and so are more
seconds (`-timeout`) or more memory (`-rss_limit_mb`) than the options allow.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["walsender_bridge", "spark_consumers"]):
    from spark_consumers.decode.entries import decode_entries
    from walsender_bridge.change_log.client import LogEntry
    from walsender_bridge.change_log.entry import (
        Codec,
        build_entry,
        read_header,
        schema_hash,
        schema_record,
    )
    from walsender_bridge.errors import (
        CorruptError,
        MalformedMessageError,
        NotSupportedError,
        UnsupportedValueError,
    )
    from walsender_bridge.postgres.protocol import pgoutput

EXPECTED = (CorruptError, MalformedMessageError, NotSupportedError, UnsupportedValueError)
PARSERS = (
    *(pgoutput.parse_begin, pgoutput.parse_commit, pgoutput.parse_message),
    *(pgoutput.parse_stream_start, pgoutput.parse_stream_commit, pgoutput.parse_stream_abort),
    *(pgoutput.parse_relation, pgoutput.parse_type),
)


def split(data: bytes) -> Iterator[bytes]:
    """The messages of an input; the last one may be cut."""
    at = 0
    while at + 2 < len(data):
        length = int.from_bytes(data[at : at + 2], "little")
        yield data[at + 2 : at + 2 + length]
        at += 2 + length


def join(messages: list[bytes]) -> bytes:
    """An input of these messages, those that are too long left out."""
    return b"".join(len(m).to_bytes(2, "little") + m for m in messages if len(m) < 1 << 16)


class Target:
    """One input after the other. `known`: schema records by their relations' OIDs."""

    def __init__(self, known: dict[int, bytes]) -> None:
        self._hashes = {oid: schema_hash(record) for oid, record in known.items()}
        self._registry = {schema_hash(record): record for record in known.values()}

    def __call__(self, data: bytes) -> None:
        """Every stage."""
        messages = list(split(data))
        for message in messages:
            for parse in PARSERS:
                with contextlib.suppress(MalformedMessageError):
                    parse(message)
        hashes, registry = dict(self._hashes), dict(self._registry)
        with contextlib.suppress(*EXPECTED):
            for message in messages:
                if message[:1] == bytes([pgoutput.RELATION]):
                    record = schema_record(message, [])
                    hashes[pgoutput.relation_oid(message)] = schema_hash(record)
                    registry[schema_hash(record)] = record
            described = {pgoutput.RELATION, pgoutput.TYPE}
            changes = [m for m in messages if m and m[0] not in described]
            entry = build_entry(
                changes, timeline=1, previous_crc=0, schema_hashes=hashes, codec=Codec.NONE
            )
            read_header(entry)
            for batch in decode_entries([LogEntry(1, 1, 1, entry)], registry.__getitem__):
                for array in (*batch.columns, *(batch.old_columns or ())):
                    array.validate(full=True)


def main() -> None:
    """Fuzz until libFuzzer's options end it."""
    records = json.loads(Path(sys.argv[1]).read_text())
    target = Target({int(oid): bytes.fromhex(record) for oid, record in records.items()})
    atheris.Setup([sys.argv[0], *sys.argv[2:]], target)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
