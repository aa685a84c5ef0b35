"""Sums of digests, chunks, and what is named of rows that differ."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pytest

from spark_consumers.decode.types import INT8, TEXT, column_type
from spark_consumers.lake.comparison.chunks import Chunks, buckets_of, ranges_of, sampled
from spark_consumers.lake.comparison.forms import forms, joined
from spark_consumers.lake.comparison.sums import Sums, added, differing, digests
from spark_consumers.lake.equality.cut import Cut
from spark_consumers.lake.equality.record import Difference, EqualityRecord, TableRecord
from spark_consumers.lake.equality.run import _Comparison, _why_not
from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.snapshot.key_ranges import Sample
from walsender_bridge.observability import equality_view
from walsender_bridge.postgres.column_masks import ColumnMask
from walsender_bridge.runtime import json_model

TEXTS = column_type(TEXT, -1)


def digest_of(*columns):
    arrays = [forms(pa.array(column, pa.string()), TEXTS) for column in columns]
    return digests(joined(arrays, len(columns[0])))


def test_columns_cannot_be_taken_for_one_another():
    rows = [
        ("a", "b"),
        ("ab", ""),
        ("", "ab"),
        ("ab", None),
        (None, "ab"),
        ("1:a", "-"),
        ("-", "-"),
    ]
    found = {digest_of([one], [two]) for one, two in rows}
    assert len(found) == len(rows)


def test_a_table_whose_key_was_renamed_between_two_cuts_is_divided_again():
    """The chunks are of a column that is not there any more, or that is another one."""
    table = TableVersion(
        "p", "iceberg", 1, "", ("number",), (), 0, 0, 0, 7, layout=(("number", INT8, -1),)
    )
    record = TableRecord(relation_id=7, column="id", bounds=(10,), chunks=2, done=(0,))
    run, cut, rows = MagicMock(), MagicMock(), MagicMock()
    run.record.tables = {"s.public.t": record}
    run.record.sample = 1.0
    cut.lake.manifest.tables = {"s.public.t": table}
    rows.divided.return_value = Chunks("number", (10, 20), is_uuid=False)
    planned = _Comparison(run, cut, rows, "s.public.t")._planned()
    assert (planned.column, planned.chunks, planned.done) == ("number", 3, ())
    run.record.tables = {"s.public.t": planned}
    assert _Comparison(run, cut, rows, "s.public.t")._planned() == planned


def test_sums_count_equal_rows_and_do_not_depend_on_the_order():
    one, two = Sums(1, 2**64 - 1, 5), Sums(1, 3, 2**63)
    assert added([(0, one), (0, two), (1, one)]) == {
        0: Sums(2, 2, 2**63 + 5),
        1: Sums(1, 2**64 - 1, 5),
    }
    assert not one.plus(one).equals(one)
    assert one.plus(two).equals(two.plus(one))
    assert Sums(1, 2, 3, beyond=4).equals(Sums(1, 2, 3)), "what is quarantined is not compared"


@pytest.mark.parametrize(
    ("source", "lake", "expected"),
    [
        ({(("1",), b"a"): 1}, {}, [("missing", ("1",))]),
        ({}, {(("1",), b"a"): 1}, [("extra", ("1",))]),
        ({(("1",), b"a"): 1}, {(("1",), b"b"): 1}, [("changed", ("1",))]),
        ({(("1",), b"a"): 1}, {(("1",), b"a"): 2}, [("count", ("1",))]),
        ({(("1",), b"a"): 1}, {(("1",), b"a"): 1}, []),
        ({((), b"a"): 2, ((), b"b"): 1}, {((), b"a"): 1, ((), b"b"): 1}, [("count", ())]),
        ({((), b"a"): 1}, {((), b"b"): 1}, [("missing", ()), ("extra", ())]),
    ],
)
def test_rows_that_differ_are_named(source, lake, expected):
    assert [(each.kind, each.key) for each in differing(source, lake)] == expected


@pytest.mark.parametrize("is_uuid", [False, True])
def test_each_key_is_in_one_range_whatever_was_sampled(is_uuid):
    draw = random.Random(4)
    least, most = -(2**63), 2**63 - 1
    keys = np.array(sorted(draw.randint(least, most) for _ in range(500)), np.int64)
    chunks = ranges_of([Sample(("s", "t"), 1, 10_000, keys)], "id", 1000, is_uuid=is_uuid)
    assert chunks.count == 10
    limits = [chunks.limits(number) for number in range(chunks.count)]
    assert limits[0][0] is None
    assert limits[-1][1] is None
    assert [end for _, end in limits[:-1]] == [begin for begin, _ in limits[1:]]
    if is_uuid:
        return
    tried = [least, most, *chunks.bounds, *(bound - 1 for bound in chunks.bounds)]
    for key, number in zip(tried, chunks.of_keys(pa.array(tried, pa.int64())), strict=True):
        begin, end = limits[number]
        assert begin is None or key >= begin
        assert end is None or key < end


def test_a_table_without_a_sample_is_one_range():
    assert ranges_of([], "id", 1000, is_uuid=False).count == 1
    assert (
        ranges_of([Sample(("s", "t"), 1, 0, np.zeros(0, np.int64))], "id", 9, is_uuid=False).count
        == 1
    )


def test_buckets_are_a_power_of_two():
    assert [buckets_of(size, 10).count for size in (0, 10, 11, 45, 10**9)] == [1, 1, 2, 8, 65536]
    digested = digest_of([str(n) for n in range(1000)])
    numbers = Chunks(buckets=8).of_digests(digested)
    assert set(numbers.tolist()) == set(range(8))


def test_a_sample_is_the_same_for_the_same_seed():
    assert sampled(100, 0.1, "1") == sampled(100, 0.1, "1") != sampled(100, 0.1, "2")
    assert len(sampled(100, 0.1, "1")) == 10
    assert sampled(3, 0.01, "1") == sampled(3, 0.01, "1")
    assert len(sampled(3, 0.01, "1")) == 1
    assert sampled(3, 1.0, "1") == (0, 1, 2)


def test_the_forms_of_integers_are_their_texts():
    column = pa.array([1, None, -(2**63)], pa.int64())
    assert forms(column, column_type(INT8, -1)).to_pylist() == ["1", None, str(-(2**63))]


def test_a_record_is_read_as_it_was_written_and_its_differences_are_reported():
    different = TableRecord(
        "different",
        chunks=2,
        done=(0, 1),
        different_chunks=1,
        differences=(Difference("changed", {"id": "1"}, ("t",), 1, 1, 7, 3),),
    )
    record = EqualityRecord(
        1.0, 2.0, (), 1.0, 5, {"s.public.a": TableRecord("equal"), "s.public.b": different}
    )
    assert json_model.decode(EqualityRecord, json_model.encode(record)) == record
    shown = equality_view.summary(record)
    assert shown is not None
    assert (shown["equal"], shown["different"], shown["chunks_done"]) == (1, ["s.public.b"], 2)
    assert "s.public.b" in equality_view.trouble(record)
    assert equality_view.line(shown).startswith("1 of 2 tables equal, 1 different")
    assert equality_view.trouble(None) == ""
    assert equality_view.summary(None) is None


def test_a_table_with_masked_columns_is_not_compared():
    table = TableVersion("t", "iceberg", 1, "", ("id",), (), 5, 1, 10, 10)
    masked = replace(table, masks=(ColumnMask("email", "hash"),))
    heads = [
        Manifest("lake", 1, 5, 4, 1, 0.0, tables={"shop.public.t": each})
        for each in (table, masked)
    ]
    exported: Any = SimpleNamespace(system_id=7)
    lake: Any = None
    cuts = [Cut(exported, 0.0, head, lake, {}, {"shop.public.t": "left out"}) for head in heads]
    reasons = [_why_not(cut, "shop.public.t") for cut in cuts]
    assert reasons == [("left out", False), ("some of its columns are masked", True)]


def test_a_run_of_some_tables_replaces_their_results_alone():
    different = TableRecord("different", different_chunks=1)
    equal = TableRecord("equal")
    all_of_them = EqualityRecord(
        1.0,
        2.0,
        (),
        tables={"s.public.a": different, "s.public.b": equal, "s.public.gone": different},
    )
    known = ["s.public.a", "s.public.b"]
    begun = EqualityRecord(3.0, 0.0, ("s.public.b",), tables={"s.public.b": TableRecord()})
    some = begun.after(all_of_them, known)
    assert json_model.decode(EqualityRecord, json_model.encode(some)) == some
    shown = equality_view.summary(some)
    assert shown is not None
    assert (shown["tables"], shown["different"]) == (2, ["s.public.a"])
    assert "s.public.a" in equality_view.trouble(some)
    # A run that ends early takes no result away, and one that compares replaces it.
    again = EqualityRecord(4.0, 0.0, ("s.public.a",), tables={"s.public.a": TableRecord()})
    assert equality_view.different(again.after(some, known)) == ["s.public.a"]
    other = EqualityRecord(4.0, 5.0, ("s.public.a",), tables={"s.public.a": equal})
    assert equality_view.different(other.after(some, known)) == []
    assert begun.after(None, known) == begun
