"""Whether changes are of the table as it was copied: decided from the Relation message alone."""

import re
from dataclasses import replace
from itertools import product

import numpy as np
import pyarrow as pa
import pytest

from spark_consumers.decode.entries import ChangeBatch
from spark_consumers.lake.copy.bootstrap import usable_key
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.format.table_format import ROW_ID
from spark_consumers.lake.tables.schema_match import Layout, mismatch, unusable
from spark_consumers.snapshot.exported import PublishedTable
from walsender_bridge.errors import NotSupportedError
from walsender_bridge.postgres.protocol.pgoutput import Column, Relation

COLUMNS = (("id", 23, -1), ("region", 23, -1))
#: Replica identity, the columns that the server flags, the key that follows.
SAID: tuple[tuple[str, tuple[str, ...], set[str]], ...] = (
    ("d", ("id",), {"id"}),
    ("d", ("id", "region"), {"id", "region"}),
    ("d", (), set()),
    ("i", ("region",), {"region"}),
    ("n", (), set()),
    ("f", ("id", "region"), set()),
)


def batch(identity, flagged, op):
    """One change of a table that is described so."""
    columns = tuple(Column(*column, is_key=column[0] in flagged) for column in COLUMNS)
    one = np.ones(1, np.int64)
    return ChangeBatch(
        relation=Relation(7, "public", "t", identity, columns),
        schema_hash=b"",
        ops=np.array([ord(op)], np.uint8),
        commit_lsn=one.astype(np.uint64),
        xid=one.astype(np.uint32),
        commit_time=one,
        offset=one.astype(np.uint64),
        version=one.astype(np.uint64),
        sequence=one.astype(np.uint32),
        columns=[pa.array([1], pa.int32())] * 2,
        unchanged=None,
        old_columns=None,
        old_kind=np.zeros(1, np.uint8),
    )


@pytest.mark.parametrize("op", ["I", "U", "T"])
def test_32_changes_fit_a_table_of_just_the_key_that_their_relation_flags(op):
    schema = pa.schema([("id", pa.int32()), ("region", pa.int32())])
    layout = Layout(0, COLUMNS)
    for (identity, flagged, key), (*_, other) in product(SAID, SAID):
        change = batch(identity, flagged, op)
        assert change.relation.key == key
        reason = mismatch(change, schema, layout, tuple(sorted(other)), 7)
        assert (reason is None) == (key == other)
        assert reason is None or "replica identity changed" in reason


@pytest.mark.parametrize(
    ("op", "marks", "fits"),
    [
        ("I", [False, True], False),
        ("I", [False, False], True),
        ("U", [False, True], True),
        ("D", [False, False], True),
    ],
)
def test_an_insert_without_a_value_is_no_row(op, marks, fits):
    """A row filter makes an INSERT of an UPDATE, which the server does not send unchanged TOAST values with."""
    schema = pa.schema([("id", pa.int32()), ("region", pa.int32())])
    change = replace(batch("d", ("id",), op), unchanged=np.array([marks]))
    reason = mismatch(change, schema, Layout(0, COLUMNS), ("id",), 7)
    assert (reason is None) is fits
    assert fits or "row filter" in str(reason)


@pytest.mark.parametrize(
    ("names", "word"),
    [
        ((), "no published column"),
        (("id", ROW_ID), ROW_ID),
        (("id", ROW_ID.upper()), "only in case"),
    ],
)
def test_columns_that_the_lake_cannot_keep_are_no_table(names, word):
    """ALTER TABLE may take the last column, or add one of any name, whatever there was when the table was copied."""
    columns = tuple(Column(name, 25, -1, is_key=False) for name in names)
    change = replace(batch("f", (), "I"), relation=Relation(7, "public", "t", "f", columns))
    layout = Layout(0, tuple((name, 25, -1) for name in names))
    reason = mismatch(change, pa.schema([]), layout, (), 7)
    assert word in str(reason)
    copied = PublishedTable("public", "t", 7, "r", "f", columns, None, None, ())
    with pytest.raises(NotSupportedError, match=word):
        usable_key(copied)
    # With a key the lake adds no column.
    assert bool(unusable(names, ("id",))) is not bool(names)


def test_a_column_with_a_name_of_icebergs_own_is_refused_since_spark_reads_no_such_table():
    for name in ("_file", "_pos", "_deleted", "_spec_id", "_partition", "_row_id"):
        columns = (Column("id", 23, -1, is_key=True), Column(name, 25, -1, is_key=False))
        copied = PublishedTable("public", "t", 7, "r", "d", columns, ("id",), None, ())
        with pytest.raises(NotSupportedError, match=f"'{name}' has the name of an Iceberg"):
            usable_key(copied)
    assert unusable(("id", "pos", "_POS", "_change_type"), ("id",)) is None


@pytest.mark.parametrize("taken", ["tags.element", "TAGS.Element"])
def test_a_column_named_like_the_elements_of_an_array_is_refused_since_iceberg_names_both_alike(
    taken,
):
    tags, other = Column("tags", 1007, -1, is_key=False), Column(taken, 23, -1, is_key=False)
    columns = (Column("id", 23, -1, is_key=True), tags, other)
    word = f"'{taken}' has the name that Iceberg gives to the elements of its array 'tags'"
    copied = PublishedTable("public", "t", 7, "r", "d", columns, ("id",), None, ())
    with pytest.raises(NotSupportedError, match=word):
        usable_key(copied)
    # As a plain new column of a table that is followed: the lake's own table could not get it.
    change = replace(batch("d", (), "I"), relation=Relation(7, "public", "t", "d", columns))
    before = Layout(0, tuple((c.name, c.type_oid, c.typmod) for c in columns[:2]))
    assert word in str(mismatch(change, pa.schema([]), before, ("id",), 7))
    # The same names, without an array.
    assert unusable(("id", "tags", taken), ("id",)) is None


@pytest.mark.parametrize("table", ["x/../../../planted/y", "a" * 63, "plain", "nul\x01"])
def test_scratch_files_have_names_that_no_table_chooses(table):
    names = [f"{stream}.public.{table}" for stream in ("shop", "bank")]
    schema = pa.schema([("id", pa.int32())])
    made = {Target(name, "r", "p", schema, schema, ("id",), 0, 1).scratch_name for name in names}
    assert len(made) == 2, "two tables of an epoch would share a file"
    assert all(re.fullmatch(r"[0-9a-f]{20}", name) for name in made)


@pytest.mark.parametrize(
    "pair", [("Value", "value"), ("\u00c4", "\u00e4"), ("\u017f", "s"), ("\u212a", "k")]
)
def test_columns_that_differ_only_in_case_are_refused_since_spark_reads_no_such_table(pair):
    columns = [Column("id", 23, -1, is_key=True)]
    columns += [
        Column(name, kind, -1, is_key=False) for name, kind in zip(pair, (23, 25), strict=True)
    ]
    copied = PublishedTable("public", "t", 7, "r", "d", tuple(columns), ("id",), None, ())
    with pytest.raises(NotSupportedError, match=f"'{pair[0]}' and '{pair[1]}' differ only in case"):
        usable_key(copied)
    assert unusable(("id", "straße", "strasse", "a", "á"), ("id",)) is None
    assert unusable(("id", ROW_ID.upper()), ("id",)) is None
    assert "differ only in case" in (unusable(("id", ROW_ID.upper()), ()) or "")
