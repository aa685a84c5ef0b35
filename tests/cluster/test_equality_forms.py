"""The forms of values, computed by PostgreSQL and by an executor: equal exactly where the values are."""

import random
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from psycopg import sql

from spark_consumers.decode.types import column_type
from spark_consumers.lake.comparison.chunks import Chunks
from spark_consumers.lake.comparison.lake import Division
from spark_consumers.lake.comparison.source import Load, SourceRows
from spark_consumers.lake.comparison.sums import KeyAndDigest, differing
from spark_consumers.snapshot.exported import ExportedSnapshot
from tests.cluster.test_types import (
    HOSTILE,
    TEXTUAL,
    TYPED,
    UNREPRESENTABLE,
    fill,
    snapshot_columns,
    table,
)
from tests.support.pinned import connect_pinned
from tests.support.servers import each_major
from tests.support.slot_changes import PUBLICATION
from tests.support.type_columns import Kinds
from tests.support.waiting import wait_for

WHOLE = Chunks()


def both_sides(dsn, rows=None, chunks=WHOLE):
    """The keys and digests of table t at the source, and of the Arrow `rows` (None: what a copy reads)."""
    if rows is None:
        rows, _ = snapshot_columns(dsn)
    with ExportedSnapshot(dsn) as exported:
        (there,) = exported.tables(PUBLICATION)
        with SourceRows(exported, time.monotonic(), Load(1.0, 600), lambda: None) as reader:
            parts = reader.blocks(there, 32 << 20)
            ours: dict[KeyAndDigest, int] = {}
            sums = [each for part in parts for each in reader.sums(there, chunks, None, part)]
            for part in parts:
                ours |= dict(reader.keys(there, chunks, None, part))
    kinds = tuple(column_type(c.type_oid, c.typmod) for c in there.columns)
    names = [c.name for c in there.columns]
    key = tuple(names.index(name) for name in there.key or ())
    division = Division(kinds, key, chunks, frozenset(range(chunks.count)))
    columns = [column.combine_chunks() for column in rows.select(names).columns]
    found = division.digested(columns)
    keys = found.rows_of(division.key).to_pylist()
    digests = found.digests().to_pylist()
    theirs = Counter(zip(map(tuple, keys), digests, strict=True))
    assert {n for n, _ in sums} <= set(found.chunks.tolist()) or sums[0][1].rows == 0
    return ours, theirs, sums


@each_major
def test_23_all_types_have_the_same_forms_on_both_sides(database):
    kinds = {**TYPED, **TEXTUAL}
    table(database, kinds)
    fill(database, kinds)
    ours, theirs, sums = both_sides(database.dsn)
    assert differing(ours, theirs) == []
    assert sum(part.rows for _, part in sums) == len(ours) == len(theirs) > 150


@each_major
def test_23_no_setting_of_the_database_changes_a_form(database):
    kinds = {**TYPED, **TEXTUAL}
    table(database, kinds)
    fill(database, kinds)
    with connect_pinned(database.dsn) as connection:
        known = {str(n).lower() for (n,) in connection.execute("SELECT name FROM pg_settings")}
    rows, _ = snapshot_columns(database.dsn)
    database.execute(
        *(
            f"ALTER DATABASE {database.name} SET {n} = '{v}'"
            for n, v in HOSTILE.items()
            if n.lower() in known
        )
    )
    ours, theirs, _ = both_sides(database.dsn, rows)
    assert differing(ours, theirs) == []


@each_major
def test_23_rows_that_the_lake_cannot_hold_are_counted_apart(database):
    kinds = dict(UNREPRESENTABLE)
    table(database, {kind: [] for kind in kinds})
    for number, (kind, value) in enumerate(UNREPRESENTABLE):
        column = f"c{list(kinds).index(kind)}"
        with connect_pinned(database.dsn, autocommit=True) as connection:
            connection.execute(
                sql.SQL("INSERT INTO t (id, {}) VALUES ({}, {})").format(
                    sql.Identifier(column), sql.Literal(number), sql.Literal(value)
                )
            )
    database.execute("INSERT INTO t (id) VALUES (1000)")
    rows = pa.table({"id": pa.array([1000], pa.int32())})
    for i in range(len(kinds)):
        with connect_pinned(database.dsn) as connection:
            query = "SELECT atttypid::bigint, atttypmod FROM pg_attribute WHERE attrelid = 't'::regclass AND attname = %s"
            ((oid, typmod),) = connection.execute(query, [f"c{i}"]).fetchall()
        rows = rows.append_column(f"c{i}", pa.nulls(1, column_type(oid, typmod).arrow))
    ours, theirs, sums = both_sides(database.dsn, rows)
    assert differing(ours, theirs) == []
    assert sum(part.beyond for _, part in sums) == len(UNREPRESENTABLE)
    assert sum(part.rows for _, part in sums) == 1


#: What the lake has instead of a value, by the column of `PLANTED`.
PLANTED: dict[str, tuple[str, list[Any]]] = {
    "text": ("Abc", ["abc", "Abc ", "", None]),
    "char(5)": ("ab", ["ab", "ab  ", None]),
    "double precision": ("0", [-0.0, float("nan"), 5e-324, None]),
    "real": ("NaN", [0.0, None]),
    "numeric(10,2)": ("1.50", ["1.51", "-1.50", None]),
    "numeric": ("1.0", ["1.00", "1", None]),
    "timestamptz": ("2024-01-01 00:00:00.000001+00", ["2024-01-01 00:00:00+00", None]),
    "bytea": ("\\x00", [b"", b"\0\0", None]),
    "integer[]": ("{1,2}", [[1], [2, 1], [1, 2, None], [], None]),
    "text[]": ('{"a,b"}', [["a", "b"], ["a,b", ""], [None], None]),
    "boolean": ("t", [False, None]),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_23_another_value_has_another_form(database, kind):
    value, others = PLANTED[kind]
    table(database, {kind: []})
    fill(database, {kind: [value]})
    rows, _ = snapshot_columns(database.dsn)
    column = rows["c0"].combine_chunks()
    for other in others:
        if pa.types.is_decimal(column.type) and other is not None:
            changed = pa.array([other], pa.string()).cast(column.type)
        elif pa.types.is_timestamp(column.type) and other is not None:
            changed = pc_timestamp(other, column.type)
        else:
            changed = pa.array([other], column.type)
        planted = rows.set_column(
            1, "c0", pa.chunked_array([pa.concat_arrays([changed, column[1:]])])
        )
        ours, theirs, _ = both_sides(database.dsn, planted)
        (found,) = differing(ours, theirs)
        assert (found.kind, found.key) == ("changed", ("1",)), other
    ours, theirs, _ = both_sides(database.dsn, rows)
    assert differing(ours, theirs) == []


def pc_timestamp(text, kind):
    return pa.array([text.removesuffix("+00")]).cast(pa.timestamp("us")).cast(kind)


@each_major
def test_23_random_tables_have_the_same_forms_on_both_sides(database, seed):
    draw = random.Random(f"{seed} forms")
    with connect_pinned(database.dsn, autocommit=True) as connection:
        kinds = Kinds(connection, draw)
        # Arrays that may be no lists are another test's.
        chosen = [kind for kind in (kinds.any() for _ in range(40)) if not kind.as_list]
        columns = ", ".join(f"c{i} {kind.ddl}" for i, kind in enumerate(chosen))
        connection.execute(f"CREATE TABLE t (id int PRIMARY KEY, {columns})".encode())
        connection.execute(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE t".encode())
        for number in range(60):
            values = [None if draw.random() < 0.2 else k.values(draw) for k in chosen]
            marks = ", ".join(["%s"] * (len(values) + 1))
            connection.execute(f"INSERT INTO t VALUES ({marks})".encode(), [number, *values])
    for chunks in (WHOLE, Chunks(buckets=8)):
        ours, theirs, _ = both_sides(database.dsn, chunks=chunks)
        assert differing(ours, theirs) == []
        assert len(ours) == 60


@contextmanager
def encoded(database, encoding):
    """A database of another encoding, on the same server."""
    name = f"{database.name}_{encoding.lower()}"
    database.execute(
        f"CREATE DATABASE {name} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"
    )
    try:
        yield replace(database, name=name)
    finally:
        # The slot of the cut is temporary: it goes when the server notices that its connection has ended.
        slots = f"SELECT FROM pg_replication_slots WHERE database = '{name}'"
        with database.connect() as connection:
            wait_for(lambda: not connection.execute(slots).fetchall(), 30, "the cut's slot is gone")
        database.execute(f"DROP DATABASE {name}")


@each_major
@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII", "UTF8"])
def test_23_the_encoding_of_the_server_does_not_matter(database, encoding):
    with encoded(database, encoding) as other:
        kinds = {"text": ["ö", "plain"], "text[]": ["{é,NULL}"], "varchar(9)": ["öäü"]}
        table(other, kinds)
        fill(other, kinds)
        for chunks in (WHOLE, Chunks(buckets=8)):
            ours, theirs, _ = both_sides(other.dsn, chunks=chunks)
            assert differing(ours, theirs) == []
            assert len(ours) == 5


@each_major
def test_23_rows_of_a_sql_ascii_database_that_are_no_utf8_are_counted_apart(database):
    """The server itself cannot send them."""
    no_utf8 = [
        b"\\xff",
        b"a\\xc3",
        b"\\xed\\xa0\\x80",
        b"\\xc0\\x80",
        b"\\xf4\\x90\\x80\\x80",
        b"\\xe4b",
    ]
    some_utf8 = [
        b"\\x7f",
        b"\\xc3\\xa4",
        b"\\xed\\x9f\\xbf",
        b"\\xf4\\x8f\\xbf\\xbf",
        b"\\xf0\\x90\\x80\\x80\n",
    ]
    with encoded(database, "SQL_ASCII") as other:
        table(other, {"text": []})
        with other.connect() as connection:
            for number, value in enumerate(some_utf8):
                connection.execute(b"INSERT INTO t VALUES (%d, E'%b')" % (number, value))
            rows, _ = snapshot_columns(other.dsn)
            for number, value in enumerate(no_utf8):
                connection.execute(b"INSERT INTO t VALUES (%d, E'%b')" % (100 + number, value))
        ours, theirs, sums = both_sides(other.dsn, rows)
        assert differing(ours, theirs) == []
        assert sum(part.rows for _, part in sums) == len(some_utf8)
        assert sum(part.beyond for _, part in sums) == len(no_utf8)


def test_a_limited_comparison_reads_so_many_bytes_in_a_second(database):
    rate, size = 4 << 20, 1 << 20
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, x text)",
        "INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(1, 8000) AS g",
        "ANALYZE t",
        f"CREATE PUBLICATION {PUBLICATION} FOR TABLE t",
    )
    with ExportedSnapshot(database.dsn) as exported:
        (there,) = exported.tables(PUBLICATION)
        load = Load(1.0, 600, rate)
        with SourceRows(exported, time.monotonic(), load, lambda: None) as reader:
            (relation,) = reader.relations(there)
            wanted = relation.blocks * relation.block_size / rate
            assert wanted > 0.9
            ranges = reader.divided(there, size)
            assert (ranges.column, ranges.count > 3) == ("id", True)
            by_range = [
                (number, part)
                for number in range(ranges.count)
                for part in ranges.ranges(number, [(relation.schema, relation.name, relation.oid)])
            ]
            by_blocks = [(0, part) for part in reader.blocks(there, size)]
            assert len(by_blocks) > 3
            for chunks, some in ((ranges, by_range), (WHOLE, by_blocks)):
                began = time.monotonic()
                sums = [
                    each for _, part in some for _, each in reader.sums(there, chunks, None, part)
                ]
                assert sum(each.rows for each in sums) == 8000
                assert 0.95 * wanted < time.monotonic() - began < 3 * wanted


@pytest.mark.parametrize(
    ("load", "busy", "size", "rest"),
    [
        (Load(1.0, 600), 3.0, 1e9, 0.0),
        (Load(0.5, 600), 3.0, 1e9, 3.0),
        (Load(0.01, 600), 3.0, 1e9, 60.0),
        (Load(1.0, 600, 1e6), 3.0, 1e6, 0.0),
        (Load(1.0, 600, 1e6), 3.0, 200e6, 197.0),
        (Load(0.5, 600, 1e6), 3.0, 4e6, 3.0),
    ],
)
def test_the_longer_rest_counts(load, busy, size, rest):
    assert load.rest(busy, size) == rest
