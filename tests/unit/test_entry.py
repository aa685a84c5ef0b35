"""Entries: the golden bytes of format 1, the derived header, and what is refused."""

import dataclasses
import random
import struct
import time
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import pgoutput_messages as pg
from walsender_bridge.change_log import entry
from walsender_bridge.errors import CorruptError, MalformedMessageError, NotSupportedError

GOLDEN = Path(__file__).parent / "golden"
ACCOUNTS, TRANSFERS = 16385, 16390
ACCOUNTS_SCHEMA = entry.schema_record(
    pg.relation(ACCOUNTS, "accounts", [("id", 23), ("owner", 25), ("mood", 16400)]),
    [pg.type_message(16400, "mood")],
)
TRANSFERS_SCHEMA = entry.schema_record(pg.relation(TRANSFERS, "transfers", [("id", 20)]))
HASHES = {
    ACCOUNTS: entry.schema_hash(ACCOUNTS_SCHEMA),
    TRANSFERS: entry.schema_hash(TRANSFERS_SCHEMA),
}
#: Two whole transactions over two tables, one with a TRUNCATE.
WHOLE = [
    *pg.transaction(
        0x16B3748,
        731,
        [
            pg.insert(ACCOUNTS, [b"1", b"Ada", b"calm"]),
            pg.update(ACCOUNTS, [b"1", "Ad\u00e9".encode(), None]),
            pg.insert(TRANSFERS, [b"9000000000"]),
        ],
    ),
    *pg.transaction(
        0x16B3A00,
        730,
        [pg.delete(ACCOUNTS, [b"1", None, None]), pg.truncate(ACCOUNTS, TRANSFERS)],
        pg.START_TIME + 1_500_000,
    ),
]
#: The middle of a big transaction: it neither begins nor ends here.
MIDDLE = [pg.insert(TRANSFERS, [str(n).encode()]) for n in range(3)]


def build(messages: list[bytes], **changes: object) -> bytes:
    arguments: dict[str, object] = {
        "timeline": 3,
        "previous_crc": 0,
        "schema_hashes": HASHES,
        "codec": entry.Codec.NONE,
    }
    return entry.build_entry(messages, **(arguments | changes))  # type: ignore[arg-type]


def golden_chain() -> dict[str, bytes]:
    """The entries of the golden files, each chained to the one before it."""
    whole = build(WHOLE)
    middle = build(MIDDLE, previous_crc=entry.read_header(whole).crc)
    marker = build(
        [], previous_crc=entry.read_header(middle).crc, kind=entry.EntryKind.RESTART, timeline=4
    )
    return {"entry-v1-whole": whole, "entry-v1-middle": middle, "entry-v1-marker": marker}


@pytest.mark.parametrize("name", list(golden_chain()))
def test_format_1_is_written_byte_for_byte(name: str) -> None:
    assert golden_chain()[name] == (GOLDEN / f"{name}.bin").read_bytes()


def test_golden_entries_verify_as_a_chain_and_only_in_their_order() -> None:
    stored = [(GOLDEN / f"{name}.bin").read_bytes() for name in golden_chain()]
    previous = 0
    for data in stored:
        previous = entry.verify(data, previous).crc
    with pytest.raises(CorruptError, match="follows"):
        entry.verify(stored[2], entry.read_header(stored[0]).crc)


def test_a_golden_compressed_entry_reads_as_the_messages_that_it_holds() -> None:
    # Another zstd may compress otherwise; what was compressed must read for ever.
    data = (GOLDEN / "entry-v1-zstd.bin").read_bytes()
    entry.verify(data, 0)
    assert entry.split_messages(entry.read_payload(data)) == WHOLE


def partitioned() -> bytes:
    """Two rows of `transfers` are partitions'."""
    return build(
        WHOLE,
        partitions=[
            entry.PartitionRow(16500, HASHES[TRANSFERS], 3),
            entry.PartitionRow(16501, HASHES[ACCOUNTS], 1),
        ],
    )


def test_format_2_names_partitions_and_is_written_only_with_some() -> None:
    data = partitioned()
    assert data == (GOLDEN / "entry-v2-partitions.bin").read_bytes()
    found, plain = entry.verify(data, 0), entry.read_header(build(WHOLE))
    assert [(p.relation_id, p.number) for p in found.partitions] == [(16500, 3), (16501, 1)]
    assert [p.schema_hash for p in found.partitions] == [HASHES[TRANSFERS], HASHES[ACCOUNTS]]
    assert (found.relations, plain.partitions) == (plain.relations, ())
    assert (data[4], build(WHOLE)[4]) == (2, 1)
    assert len(data) == found.length
    assert entry.split_messages(entry.read_payload(data)) == WHOLE


def test_golden_schema_records_keep_their_names() -> None:
    assert (GOLDEN / "schema-v1-accounts.bin").read_bytes() == ACCOUNTS_SCHEMA
    assert HASHES[ACCOUNTS].hex() == "587b3845ae3ad19ed42cde0f54a49ac5"
    assert entry.split_schema_record(ACCOUNTS_SCHEMA)[0][:1] == b"R"


def test_the_header_is_derived_from_the_messages() -> None:
    header = entry.read_header(build(WHOLE))
    assert header.starts_transaction
    assert header.ends_transaction
    assert (header.first_end_lsn, header.last_end_lsn) == (0x16B3778, 0x16B3A30)
    assert header.first_commit_time == pg.START_TIME
    assert header.last_commit_time == pg.START_TIME + 1_500_000
    assert (header.min_xid, header.max_xid, header.message_count) == (730, 731, 9)
    assert header.relations == (
        entry.RelationCounts(ACCOUNTS, HASHES[ACCOUNTS], 1, 1, 1, 1),
        entry.RelationCounts(TRANSFERS, HASHES[TRANSFERS], 1, 0, 0, 1),
    )


def test_a_cut_inside_a_transaction_shows_in_the_flags() -> None:
    first, middle, last = (
        entry.read_header(build(m)) for m in (WHOLE[:2], MIDDLE, [*MIDDLE, WHOLE[4]])
    )
    assert (first.starts_transaction, first.ends_transaction) == (True, False)
    assert (middle.starts_transaction, middle.ends_transaction) == (False, False)
    assert (last.starts_transaction, last.ends_transaction) == (False, True)
    assert (middle.first_end_lsn, middle.last_end_lsn, middle.min_xid) == (0, 0, 0)


def test_types_of_a_schema_are_ordered_and_single() -> None:
    relation = pg.relation(1, "t", [("a", 16400), ("b", 16399)])
    one, two = pg.type_message(16400, "x"), pg.type_message(16399, "y")
    record = entry.schema_record(relation, [one, two, one])
    assert entry.split_schema_record(record) == [relation, two, one]
    assert record == entry.schema_record(relation, [two, one])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "without messages"),
        ([b""], "empty"),
        ([b"R123456"], "not allowed in an entry"),
        ([b"I12"], "truncated row"),
        ([b"B12"], "wrong length"),
        ([pg.truncate(ACCOUNTS)[:-1]], "wrong length"),
        ([pg.insert(999, [])], "relation 999"),
    ],
)
def test_messages_that_make_no_entry(messages: list[bytes], message: str) -> None:
    with pytest.raises(MalformedMessageError, match=message):
        build(messages)


def test_a_newer_format_is_refused_by_its_number() -> None:
    data = bytearray(build(WHOLE, previous_crc=77))
    data[4] = 3
    # What stays in its place in every format: the checksum, which ends the fixed header of 86 bytes.
    head, tail = bytes(data[:82]), bytes(data[86:])
    data[82:86] = google_crc32c.extend(google_crc32c.extend(77, head), tail).to_bytes(4, "little")
    with pytest.raises(NotSupportedError, match="format 3"):
        entry.read_header(bytes(data))


def test_a_payload_that_claims_another_length_is_not_decompressed() -> None:
    data = bytearray(build(WHOLE, codec=entry.Codec.ZSTD))
    at = 4 + 2 + 1 + 1 + 2 + 4 + 16 + 16 + 12
    assert struct.unpack_from("<Q", data, at)[0] == entry.read_header(bytes(data)).raw_length
    struct.pack_into("<Q", data, at, 5)
    with pytest.raises(CorruptError, match="length differs"):
        entry.read_payload(bytes(data))


@given(seed=st.integers(0, 2**32), codec=st.sampled_from(entry.Codec))
def test_any_flipped_bit_is_found(seed: int, codec: entry.Codec) -> None:
    choose = random.Random(seed)
    data = bytearray(build(WHOLE, codec=codec, previous_crc=77))
    entry.verify(bytes(data), 77)
    data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
    with pytest.raises(CorruptError):
        entry.verify(bytes(data), 77)


def test_a_format_number_that_was_flipped_is_damage_and_no_newer_format() -> None:
    for bit in range(16):
        data = bytearray(build(WHOLE, previous_crc=77))
        data[4 + bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptError, match="checksum mismatch"):
            entry.read_header(bytes(data))


@given(data=st.binary(max_size=400), cut=st.integers(0, 400))
def test_arbitrary_bytes_are_refused_by_name(data: bytes, cut: int) -> None:
    for candidate in (data, build(WHOLE)[:cut] + data, entry.MAGIC + b"\1\0\1\1" + data):
        try:
            entry.read_payload(candidate)
        except CorruptError:
            pass
        except NotSupportedError as error:
            assert "format" in error.what  # noqa: PT017 - both classes are right, for different bytes


@given(
    shapes=st.lists(st.lists(st.binary(max_size=50), max_size=4), min_size=1, max_size=6),
    codec=st.sampled_from(entry.Codec),
)
def test_what_goes_in_comes_out(shapes: list[list[bytes]], codec: entry.Codec) -> None:
    messages: list[bytes] = []
    for number, rows in enumerate(shapes):
        changes = [pg.insert(TRANSFERS, [value]) for value in rows]
        messages += pg.transaction(1000 * (number + 1), number + 5, changes)
    data = build(messages, codec=codec)
    header = entry.verify(memoryview(data), 0)
    assert entry.split_messages(entry.read_payload(memoryview(data), header)) == messages
    assert sum(r.inserts for r in header.relations) == sum(map(len, shapes))
    assert dataclasses.replace(header, crc=0).length == len(data)


def test_entries_are_built_faster_than_capture_reads() -> None:
    # The bound is an eighth of what a quiet core does (3.4M messages a second).
    messages = []
    for number in range(2000):
        changes = [pg.update(ACCOUNTS, [b"%d" % (number * k), b"x" * 40, b"y"]) for k in range(5)]
        messages += pg.transaction(1000 * number, number, changes)
    build(messages, codec=entry.Codec.ZSTD)
    start = time.process_time()
    for _ in range(10):
        build(messages, codec=entry.Codec.ZSTD)
    assert len(messages) * 10 / (time.process_time() - start) > 300_000
