"""The decoder against the straightforward one, and each thing that it must get right by itself."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_consumers.decode.entries import ChangeBatch, decode_entries, last_begun
from tests.support import pgoutput_messages as pm
from tests.support import plain_decoder
from tests.support.change_entries import (
    UNCHANGED,
    Entries,
    Table,
    cut,
    delete,
    insert,
    logs,
    transactions,
    update,
)
from tests.support.plain_decoder import Change, PlainDecoder
from walsender_bridge.change_log.client import LogEntry, read_header
from walsender_bridge.errors import (
    CorruptError,
    MalformedMessageError,
    NotSupportedError,
    UnsupportedValueError,
)

INT, TEXT = 23, 25
ORDERS = Table(1, "orders", (("id", INT, -1), ("note", TEXT, -1)))
AUDIT = Table(2, "audit", (("order_id", INT, -1), ("what", TEXT, -1)), "f")


def decoded(log: Entries, **options: Any) -> list[ChangeBatch]:
    return list(decode_entries(log.entries, log.schemas, **options))


def one(log: Entries, **options: Any) -> ChangeBatch:
    (batch,) = decoded(log, **options)
    return batch


def as_changes(batches: list[ChangeBatch]) -> list[Change]:
    """The batches row by row, with the marks of unchanged values put in."""
    found = []
    for batch in batches:
        for i in range(len(batch)):
            op = chr(batch.ops[i])
            new = [column[i].as_py() for column in batch.columns] if op in "IU" else None
            if new is not None and batch.unchanged is not None:
                for j in np.flatnonzero(batch.unchanged[i]):
                    assert new[j] is None
                    new[j] = plain_decoder.UNCHANGED
            old = None
            if batch.old_kind[i]:
                assert batch.old_columns is not None
                old = [column[i].as_py() for column in batch.old_columns]
            found.append(
                Change(
                    batch.relation.full_name,
                    op,
                    int(batch.commit_lsn[i]),
                    int(batch.xid[i]),
                    int(batch.commit_time[i]),
                    int(batch.offset[i]),
                    int(batch.version[i]),
                    int(batch.sequence[i]),
                    new,
                    old,
                    int(batch.old_kind[i]),
                )
            )
    return found


def by_relation(changes: list[Change]) -> dict[str, list[Change]]:
    found: dict[str, list[Change]] = {}
    for change in changes:
        found.setdefault(change.relation, []).append(change)
    return found


@settings(max_examples=150)
@given(logs())
def test_equals_the_straightforward_decoder(log: Entries) -> None:
    plain = by_relation(PlainDecoder(log.schemas).decode(log.entries))
    for size in (1, 300, 2**20):
        assert by_relation(as_changes(decoded(log, target_bytes=size))) == plain


@settings(max_examples=100)
@given(logs())
def test_relations_can_be_left_out_even_when_the_log_leaves_out_their_entries(log: Entries) -> None:
    plain = by_relation(PlainDecoder(log.schemas).decode(log.entries))
    for name in {"public.t1", *plain}:
        wanted = by_relation(as_changes(decoded(log, relations={name})))
        assert wanted == ({name: plain[name]} if name in plain else {})


def is_begun(entry: LogEntry) -> bool:
    """Whether a transaction begins in the entry that goes on behind it."""
    header = read_header(entry.data)
    return bool(header.max_xid) and not header.ends_transaction


@settings(max_examples=100)
@given(logs(), st.data())
def test_a_run_may_start_inside_a_transaction(log: Entries, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(log.entries)))
    before, behind = log.entries[:at], log.entries[at:]
    begun = [last_begun(entry) for entry in before if is_begun(entry)]
    known = begun[-1] if begun else None
    for name, wanted in by_relation(as_changes(decoded(log))).items():
        oid = int(name.removeprefix("public.t"))
        # As the log leaves out entries.
        sent = [
            entry
            for entry in behind
            if is_begun(entry) or oid in {r.relation_id for r in read_header(entry.data).relations}
        ]
        first = [*decode_entries(before, log.schemas, relations={name})]
        for entries in (behind, sent):
            then = [*decode_entries(entries, log.schemas, relations={name}, begun=known)]
            assert as_changes([*first, *then]) == wanted


def test_an_entry_in_which_no_transaction_begins_is_none_that_a_run_starts_behind() -> None:
    rows = [insert(ORDERS, [i, "x"]) for i in range(4)]
    log = cut(list(transactions([rows], xid=77)), [ORDERS], [2, 4])
    assert last_begun(log.entries[0]).xid == 77
    with pytest.raises(
        MalformedMessageError, match="no transaction begins in the entry at offset 2"
    ):
        last_begun(log.entries[1])


def test_a_transaction_goes_on_over_entries_and_batches() -> None:
    rows = [insert(ORDERS, [i, "x" * 50]) for i in range(20)]
    log = cut(list(transactions([rows], xid=77)), [ORDERS], range(3, 20, 3))
    batches = decoded(log, target_bytes=100)
    assert len(batches) > 3
    assert {int(xid) for batch in batches for xid in batch.xid} == {77}
    assert [row for b in batches for row in b.columns[0].to_pylist()] == list(range(20))
    assert {int(lsn) for batch in batches for lsn in batch.commit_lsn} == {0x1000}


def test_a_missing_entry_is_an_error() -> None:
    log = cut(list(transactions([[insert(ORDERS, [i, "x"])] for i in range(3)])), [ORDERS], [3, 6])
    del log.entries[1]
    with pytest.raises(CorruptError, match="expected offset 2, got 3"):
        decoded(log)


def test_33_a_flipped_bit_anywhere_in_an_entry_is_an_error_with_its_offset() -> None:
    rows = [[insert(ORDERS, (n, "x" * n))] for n in range(6)]
    log = cut(list(transactions(rows)), [ORDERS], [6, 12])
    data = bytes(log.entries[1].data)
    for bit in range(0, 8 * len(data), 3):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        log.entries[1] = replace(log.entries[1], data=bytes(flipped))
        with pytest.raises((CorruptError, NotSupportedError)) as caught:
            decoded(log)
        assert "offset 2" in caught.value.where


def test_33_entries_in_a_wrong_order_are_an_error() -> None:
    rows = [[insert(ORDERS, (n, "x"))] for n in range(9)]
    log = cut(list(transactions(rows)), [ORDERS], [9, 18])
    _, second, third = log.entries
    log.entries[1:] = [replace(third, offset=second.offset), replace(second, offset=third.offset)]
    with pytest.raises(CorruptError, match="follows an entry"):
        decoded(log)


def test_24_unchanged_values_under_the_default_identity_stay_unknown() -> None:
    changes = [update(ORDERS, [1, UNCHANGED]), update(ORDERS, [2, "new"], [1, None])]
    batch = one(cut(list(transactions([changes])), [ORDERS]))
    assert batch.unchanged is not None
    assert batch.unchanged.tolist() == [[False, True], [False, False]]
    assert batch.columns[1].to_pylist() == [None, "new"]
    assert batch.old_kind.tolist() == [0, ord("K")]
    assert batch.old_columns is not None
    assert batch.old_columns[0].to_pylist() == [None, 1]


def test_24_unchanged_values_under_identity_full_come_from_the_old_row() -> None:
    changes = [
        update(AUDIT, [1, UNCHANGED], [1, "kept"], b"O"),
        update(AUDIT, [2, "new"], [1, "gone"], b"O"),
        update(AUDIT, [UNCHANGED, UNCHANGED], [3, None], b"O"),
    ]
    batch = one(cut(list(transactions([changes])), [AUDIT]))
    assert batch.unchanged is None
    assert batch.columns[0].to_pylist() == [1, 2, 3]
    assert batch.columns[1].to_pylist() == ["kept", "new", None]
    assert batch.old_columns is not None
    assert batch.old_columns[1].to_pylist() == ["kept", "gone", None]


def test_one_truncate_of_several_tables_is_a_change_of_each_in_its_place() -> None:
    changes = [
        insert(ORDERS, [1, "a"]),
        insert(AUDIT, [1, "a"]),
        pm.truncate(ORDERS.oid, AUDIT.oid),
        insert(ORDERS, [2, "b"]),
    ]
    found = {
        b.relation.name: bytes(b.ops)
        for b in decoded(cut(list(transactions([changes])), [ORDERS, AUDIT]))
    }
    assert found == {"orders": b"ITI", "audit": b"IT"}


def test_a_change_of_columns_between_entries_makes_batches_of_their_own_in_order() -> None:
    wider = Table(1, "orders", (*ORDERS.columns, ("total", 1700, (9 << 16 | 2) + 4)))
    log = Entries()
    for number, table in enumerate([ORDERS, wider, ORDERS]):
        values = [number, "n", "1.50"][: len(table.columns)]
        log.add(list(transactions([[insert(table, values)]], start=number << 16)), [table])
    batches = decoded(log)
    assert [len(b.columns) for b in batches] == [2, 3, 2]
    assert [b.columns[0].to_pylist() for b in batches] == [[0], [1], [2]]
    assert str(batches[1].columns[2][0].as_py()) == "1.50"


def test_columns_can_be_chosen() -> None:
    batch = one(cut(list(transactions([[insert(ORDERS, [1, "a"])]])), [ORDERS]), columns={"note"})
    assert [c.name for c in batch.relation.columns] == ["note"]
    assert [c.to_pylist() for c in batch.columns] == [["a"]]


def test_as_text_keeps_what_the_server_wrote() -> None:
    table = Table(3, "odd", (("n", 1700, (9 << 16 | 2) + 4), ("d", 1082, -1), ("b", 16, -1)))
    values = ["NaN", "0044-03-15 BC", "t"]
    log = cut(list(transactions([[insert(table, values)]])), [table])
    assert [c.to_pylist() for c in one(log, as_text=True).columns] == [["NaN"], [values[1]], ["t"]]


def test_a_value_that_does_not_fit_is_named_with_its_place() -> None:
    table = Table(3, "odd", (("id", INT, -1), ("n", 1700, (9 << 16 | 2) + 4)))
    rows = [insert(table, [1, "1.00"]), delete(table, [1, None]), insert(table, [2, "NaN"])]
    with pytest.raises(UnsupportedValueError) as caught:
        decoded(cut(list(transactions([rows], xid=801)), [table]))
    text = str(caught.value)
    for part in ("public.odd.n", "'NaN'", "transaction 801 at 0/1000", "offset 1", "message 3"):
        assert part in text


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([insert(ORDERS, [1, "a"])], "outside of a transaction"),
        ([pm.begin(1, 1), pm.begin(2, 2)], "a Begin inside of one"),
        ([pm.begin(1, 1), pm.commit(2, 3)], "another transaction"),
        ([pm.begin(1, 1), insert(ORDERS, [1])], "differs from its table's 2"),
        ([pm.begin(1, 1), insert(ORDERS, [1, "a"]) + b"x"], "unexpected bytes after a row"),
        ([pm.begin(1, 1), insert(ORDERS, [1, "a"])[:-1]], "extends beyond its message"),
        ([pm.begin(1, 1), insert(ORDERS, [1, "a"])[:-6]], "truncated"),
        (
            [pm.begin(1, 1), insert(ORDERS, [1, "a"]).replace(b"N", b"K", 1)],
            "unexpected kind of tuple",
        ),
        ([pm.begin(1, 1), delete(ORDERS, [1, UNCHANGED])], "old tuple lacks a value"),
        ([pm.begin(1, 1), insert(ORDERS, ["x", "a"])], "'x' is not in int32"),
        ([pm.begin(1, 1), insert(ORDERS, [1, "a"]).replace(b"t", b"b", 1)], "neither text, NULL"),
    ],
)
def test_what_no_server_sends_is_a_malformed_message(messages: list[bytes], what: str) -> None:
    log = Entries()
    log.add(messages, [ORDERS])
    with pytest.raises(MalformedMessageError, match=what):
        decoded(log)


def test_bytes_that_are_not_utf8_are_not_text() -> None:
    rows = [insert(ORDERS, [1, "fine"]), insert(ORDERS, [2, b"\xff\xfe"])]
    with pytest.raises(UnsupportedValueError, match="not UTF-8"):
        decoded(cut(list(transactions([rows])), [ORDERS]))


def test_a_row_of_many_megabytes() -> None:
    size = 40 * 2**20
    table = Table(4, "files", (("id", INT, -1), ("body", 17, -1), ("name", TEXT, -1)))
    rows = [insert(table, [1, b"\\x" + b"ab" * size, "big"]), insert(table, [2, "\\x", "small"])]
    log = cut(list(transactions([rows])), [table])
    batch = pa.record_batch(one(log).columns, names=["id", "body", "name"])
    assert [len(value) for value in batch["body"].to_pylist()] == [size, 0]
    assert batch["body"][0].as_buffer().to_pybytes() == b"\xab" * size


def test_floats_keep_every_bit() -> None:
    table = Table(5, "f", (("a", 701, -1), ("b", 700, -1)))
    texts = ["NaN", "Infinity", "-Infinity", "-0", "5e-324", "1.7976931348623157e+308", "0.1"]
    floats = ["NaN", "Infinity", "-Infinity", "-0", "1e-45", "3.4028235e+38", "0.1"]
    rows = [insert(table, pair) for pair in zip(texts, floats, strict=True)]
    batch = one(cut(list(transactions([rows])), [table]))
    for text, value in zip(texts, batch.columns[0].to_pylist(), strict=True):
        assert math.isnan(value) if text == "NaN" else repr(value) == repr(float(text))
    for text, value in zip(floats, batch.columns[1].to_numpy(), strict=True):
        assert np.isnan(value) if text == "NaN" else value.tobytes() == np.float32(text).tobytes()
