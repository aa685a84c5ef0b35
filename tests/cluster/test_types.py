"""Every type with its edge values, through stream and snapshot, compared with PostgreSQL's own text."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql

from spark_consumers.decode.entries import ChangeBatch, decode_entries
from spark_consumers.decode.types import column_type
from spark_consumers.lake.tables.schema_match import Layout, columns_of, mismatch
from spark_consumers.snapshot.exported import ExportedSnapshot
from spark_consumers.sources.snapshot import SnapshotSource
from tests.support.pinned import connect_pinned
from tests.support.servers import Database, each_major
from tests.support.slot_changes import PUBLICATION, changes_of
from walsender_bridge.errors import UnsupportedValueError

SETUP = [
    "CREATE TYPE mood AS ENUM ('sad', 'so so', 'happy')",
    "CREATE DOMAIN positive AS int CHECK (value > 0)",
    "CREATE DOMAIN code AS char(4)",
    "CREATE DOMAIN address AS inet",
    "CREATE DOMAIN price AS numeric(10,2)",
    "CREATE DOMAIN codes AS varchar(9)[]",
    "CREATE DOMAIN small AS positive",
    "CREATE TYPE pair AS (a int, b text)",
    "CREATE DOMAIN feeling AS mood",
    "CREATE DOMAIN feelings AS feeling",
    "CREATE DOMAIN couple AS pair",
    "CREATE DOMAIN span AS int4range",
]
#: Types that become Arrow's own, with values that those hold; all must come back as they were.
TYPED = {
    "boolean": ["true", "false"],
    "smallint": ["-32768", "0", "32767"],
    "integer": ["-2147483648", "2147483647"],
    "bigint": ["-9223372036854775808", "9223372036854775807"],
    "real": ["NaN", "Infinity", "-Infinity", "-0", "1e-45", "3.4028235e38", "0.1", "1.1754944e-38"],
    "double precision": [
        *("NaN", "Infinity", "-Infinity", "-0", "5e-324", "1.7976931348623157e308", "0.1"),
        *("0.30000000000000004", "1e22", "123456789012345680"),
    ],
    "numeric(38,0)": ["99999999999999999999999999999999999999", "-1", "0"],
    "numeric(38,38)": ["0.99999999999999999999999999999999999999", "-0.00000000000000000000000000000000000001"],
    "numeric(10,2)": ["-99999999.99", "0.00", "1.5"],
    "text": ["", "plain", "ö € 😀", "tab\tnew\nline\\", "NULL", "'quoted\"", "\x01\x7f"],
    "varchar(20)": ["", "ends in blanks  "],
    "char(5)": ["", "ab", "abcde"],
    "name": ["", "a name"],
    "bytea": ["\\x", "\\x00ff10", "\\x5c27"],
    "date": ["0001-01-01", "1969-12-31", "2000-02-29", "9999-12-31"],
    "timestamp": ["0001-01-01 00:00:00", "1969-12-31 23:59:59.999999", "9999-12-31 23:59:59.999999"],
    "timestamp(0)": ["2024-06-30 23:59:59.7"],
    "timestamptz": [
        *("0001-01-01 00:00:00+00", "2024-03-31 02:30:00 Europe/Berlin"),
        "9999-12-31 23:59:59.999999+00",
    ],
    "uuid": ["00000000-0000-0000-0000-000000000000", "A0EEBC99-9c0b-4ef8-bb6d-6bb9bd380a11"],
    "json": ['{"b": 1,  "a": [null, "\\u00e9"]}', "null", '"x"'],
    "jsonb": ['{"b": 1,  "a": [null, "\\u00e9"]}', "null", "1e500"],
    "smallint[]": ["{}", "{-32768,NULL,32767}"],
    "integer[]": ["{}", "{NULL}", "{-2147483648,NULL,2147483647}"],
    "bigint[]": ["{9223372036854775807,NULL}"],
    "text[]": [
        *("{}", '{"",NULL,"NULL",null,"a,b","{x}"}', '{"quote \\" and \\\\ slash"," blank ",é,😀}'),
        '{"new\nline","tab\t"}',
    ],
    "varchar(9)[]": ['{"a b",NULL}'],
    "char(3)[]": ["{a,NULL}"],
    "name[]": ['{"a b",NULL}'],
    "boolean[]": ["{t,f,NULL}"],
    "double precision[]": ["{NaN,1.5,-Infinity,-0}"],
    "real[]": ["{NaN,0.1,1e-45}"],
    "numeric(5,2)[]": ["{1.00,NULL,-999.99}"],
    "timestamp[]": ['{"2024-01-01 00:00:00.5",NULL}'],
    "timestamptz[]": ['{"2024-01-01 00:00:00+00",NULL}'],
    "date[]": ["{0001-01-01,9999-12-31}"],
    "json[]": ['{"{\\"a\\":  1}"}'],
    "jsonb[]": ['{"{\\"a\\": 1}"}'],
    "uuid[]": ["{00000000-0000-0000-0000-000000000000}"],
    "bytea[]": ['{"\\\\x00ff",NULL,"\\\\x"}'],
    "positive": ["7"],
    "small": ["2147483647"],
    "code": ["ab"],
    "codes": ['{"a b",NULL}'],
}  # fmt: skip
#: Types that stay PostgreSQL's text.
TEXTUAL = {
    "numeric": ["NaN", "1e-500", "-0.10", "1" * 500, "9" * 60 + "." + "9" * 60],
    "numeric(39,2)": ["1.00", "NaN"],
    "interval": ["1 year 2 mons -3 days 04:05:06.789", "-1 day", "178000000 years"],
    "time": ["00:00:00", "24:00:00", "23:59:59.999999"],
    "timetz": ["12:00:00+05:30"],
    "money": ["12.34"],
    "inet": ["1.2.3.4", "1.2.3.4/8", "::1"],
    "cidr": ["10.1.2.0/24"],
    "macaddr": ["08:00:2b:01:02:03"],
    "bit(3)": ["101"],
    "varbit": ["", "10101"],
    "point": ["(1,-2.5)"],
    "box": ["(1,1),(0,0)"],
    "polygon": ["((0,0),(1,1),(2,0))"],
    "circle": ["<(0,0),1e-300>"],
    "int4range": ["empty", "[1,5)", "(,)"],
    "tstzrange": ['["2024-01-01 00:00:00+00",infinity)'],
    "tsvector": ["'a':1A 'b c':2"],
    "oid": ["4294967295"],
    "pg_lsn": ["FFFFFFFF/FFFFFFFF"],
    '"char"': ["a", ""],
    "mood": ["so so"],
    "price": ["1.00", "NaN"],
    "positive[]": ["{{1,2},{3,NULL}}"],
    "numeric[]": ["{{1.00,2.00},{3.00,NULL}}", "{NaN}"],
    "inet[]": ["[0:1]={1.2.3.4,::1}"],
    "macaddr8": ["08:00:2b:ff:fe:01:02:03"],
    "refcursor": ["c"],
    "tsquery": ["'a' & !'b'"],
    "txid_snapshot": ["10:20:10,14,15"],
    "regclass": ["pg_class"],
    "address": ["1.2.3.4"],
    "pair": ['(1,"a ""b"" c")', "(,)"],
    "pair[]": ['{"(1,x)",NULL}'],
    "mood[]": ['{sad,"so so"}'],
    "feeling": ["so so"],
    "feelings": ["sad"],
    "feeling[]": ['{sad,"so so"}'],
    "couple": ['(1,"a ""b"" c")', "(,)"],
    "span": ["[1,5)"],
}
#: What a column of the type can hold, and its target cannot.
UNREPRESENTABLE = [
    ("numeric(10,2)", "NaN"),
    ("date", "infinity"),
    ("date", "-infinity"),
    ("date", "0044-03-15 BC"),
    ("date", "10000-01-01"),
    ("timestamp", "infinity"),
    ("timestamp", "-infinity"),
    ("timestamp", "4713-01-01 00:00:00 BC"),
    ("timestamp", "294276-12-31 23:59:59.999999"),
    ("timestamptz", "infinity"),
    ("timestamptz", "10000-01-01 00:00:00+00"),
    ("timestamptz", "0001-12-31 23:59:59.999999+00 BC"),
    ("integer[]", "{{1,2},{3,4}}"),
    ("integer[]", "[0:1]={1,2}"),
    ("text[]", '{{a},{"{"}}'),
    ("date[]", "{infinity}"),
    ("numeric(5,2)[]", "{1,NaN}"),
    ("boolean[]", "{{t},{f}}"),
]

#: Settings of a database that determine what a value or a name is as text, or how a literal is read. Those that a
#: server does not have are left out. Nothing else of pg_settings in 11 to 18 has part in that: lc_messages,
#: lc_numeric, lc_time, xmlbinary, xmloption and the like are read by functions that no type's output calls.
HOSTILE = {
    "quote_all_identifiers": "on",
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "iso_8601",
    "TimeZone": "Asia/Tokyo",
    "extra_float_digits": "-15",
    "bytea_output": "escape",
    "search_path": "public",
    "client_encoding": "LATIN1",
    "standard_conforming_strings": "off",
    "xmlbinary": "hex",
    "xmloption": "document",
    "timezone_abbreviations": "Australia",
    "default_text_search_config": "german",
}


def table(database: Database, kinds: dict[str, list[str]]) -> None:
    """A published table with a column a type."""
    columns = ", ".join(f"c{i} {kind}" for i, kind in enumerate(kinds))
    database.execute(
        *SETUP,
        f"CREATE TABLE t (id int PRIMARY KEY, {columns})",
        f"CREATE PUBLICATION {PUBLICATION} FOR TABLE t",
    )


def fill(database: Database, kinds: dict[str, list[str]]) -> None:
    """One row a value, and one of NULLs."""
    with connect_pinned(database.dsn, autocommit=True) as connection:
        number = 0
        for i, values in enumerate(kinds.values()):
            for value in values:
                number += 1
                connection.execute(
                    sql.SQL("INSERT INTO t (id, {}) VALUES ({}, {})").format(
                        sql.Identifier(f"c{i}"), sql.Literal(number), sql.Literal(value)
                    )
                )
        connection.execute("INSERT INTO t (id) VALUES (%s)", [number + 1])


def own_text(database: Database, columns: list[str]) -> list[list[str | None]]:
    """Each column as PostgreSQL itself writes it: through COPY, which uses the output functions."""
    with connect_pinned(database.dsn) as connection:
        copy = connection.cursor().copy("COPY (SELECT * FROM t ORDER BY id) TO STDOUT")
        with copy as lines:
            rows = list(lines.rows())
    return [[row[i + 1] for row in rows] for i in range(len(columns))]


def snapshot_columns(dsn: str) -> tuple[pa.Table, int]:
    """The table as the snapshot source reads it, in the order of its key; and the snapshot's LSN."""
    with ExportedSnapshot(dsn) as snapshot:
        source = SnapshotSource(
            {"dsn": dsn, "snapshot": snapshot.snapshot, "table": "public.t", "publication": "pub"}
        )
        reader = source.reader(source.schema())
        batches = [batch for part in reader.partitions() for batch in _batches(reader, part)]
        return pa.Table.from_batches(batches).sort_by("id"), snapshot.lsn


def _batches(reader: Any, part: Any) -> Iterator[pa.RecordBatch]:
    return iter(reader.read(part))


def stream_columns(batches: list[ChangeBatch]) -> pa.Table:
    """The inserts in their order, which is that of the key."""
    names = [c.name for c in batches[0].relation.columns]
    return pa.Table.from_batches([pa.record_batch(batch.columns, names=names) for batch in batches])


@each_major
def test_23_typed_values_are_exact_through_stream_and_snapshot(database: Database) -> None:
    kinds = TYPED
    table(database, kinds)
    with changes_of(database.dsn) as changes:
        fill(database, kinds)
        log = changes()
    stream = stream_columns(list(decode_entries(log.entries, log.schemas)))
    texts = stream_columns(list(decode_entries(log.entries, log.schemas, as_text=True)))
    snapshot, _ = snapshot_columns(database.dsn)
    own = own_text(database, list(kinds))
    assert stream.num_rows == snapshot.num_rows == len(own[0])
    with connect_pinned(database.dsn) as connection:
        for i, kind in enumerate(kinds):
            name = f"c{i}"
            assert texts[name].to_pylist() == own[i], kind
            assert stream[name].type == snapshot[name].type, kind
            assert bits(stream[name]) == bits(snapshot[name]), kind
            for value, text in zip(stream[name].to_pylist(), own[i], strict=True):
                assert back(connection, kind, value) == text, kind


def bits(column: pa.ChunkedArray) -> list[Any]:
    """Values that are equal only if every bit is (NaN is equal to itself, -0 is not 0)."""
    values = column.to_pylist()
    if pa.types.is_list(column.type):
        return [None if value is None else repr(value) for value in values]
    if pa.types.is_floating(column.type):
        array = column.combine_chunks()
        width = {4: pa.int32(), 8: pa.int64()}[array.type.bit_width // 8]
        return list(array.view(width).to_pylist())
    return values


def back(connection: psycopg.Connection[Any], kind: str, value: Any) -> str | None:
    """What PostgreSQL writes for our value, given back to it as this type."""
    if value is None:
        return None
    if isinstance(value, float):
        # Written as a number, -0 would lose its sign on the way.
        value = repr(value)
    cast = sql.SQL("COPY (SELECT CAST({} AS {})) TO STDOUT").format(
        sql.Literal(value), sql.SQL(kind)
    )
    with connection.cursor().copy(cast) as lines:
        (row,) = lines.rows()
    return None if row[0] is None else str(row[0])


@each_major
def test_23_every_other_type_is_its_own_text_through_stream_and_snapshot(
    database: Database,
) -> None:
    kinds = dict(TEXTUAL)
    with database.connect() as connection:
        version = connection.info.server_version
        libxml = connection.execute(
            "SELECT setting LIKE '%with-libxml%' FROM pg_config WHERE name = 'CONFIGURE'"
        ).fetchone()
    if libxml == (True,):
        kinds["xml"] = ["<a>1</a>"]
    if version >= 150000:
        kinds["numeric(5,-2)"] = ["12300", "-0"]
        kinds["numeric(3,5)"] = ["0.00123"]
    if version >= 140000:
        kinds["int4multirange"] = ["{[1,3),[5,7)}"]
        kinds["numeric"] = [*kinds["numeric"], "Infinity", "-Infinity"]
    table(database, kinds)
    with changes_of(database.dsn) as changes:
        fill(database, kinds)
        log = changes()
    stream = stream_columns(list(decode_entries(log.entries, log.schemas)))
    snapshot, _ = snapshot_columns(database.dsn)
    own = own_text(database, list(kinds))
    for i, kind in enumerate(kinds):
        assert stream[f"c{i}"].to_pylist() == own[i], kind
        assert snapshot[f"c{i}"].to_pylist() == own[i], kind
    with ExportedSnapshot(database.dsn) as exported:
        (found,) = exported.tables(PUBLICATION)
    assert all(column_type(c.type_oid, c.typmod).kept_as_text for c in found.columns[1:])


@each_major
def test_23_no_setting_of_the_database_changes_a_value(database: Database) -> None:
    """Nor how the driver finds a type: with quoted names of functions it gives an integer's bytes."""
    kinds = {**TYPED, **TEXTUAL}
    table(database, kinds)
    fill(database, kinds)
    with connect_pinned(database.dsn) as connection:
        before = own_text(database, list(kinds))
        expected, _ = snapshot_columns(database.dsn)
        known = {
            str(name).lower() for (name,) in connection.execute("SELECT name FROM pg_settings")
        }
    database.execute("TRUNCATE t")
    hostile = {name: value for name, value in HOSTILE.items() if name.lower() in known}
    database.execute(
        *(f"ALTER DATABASE {database.name} SET {n} = '{v}'" for n, v in hostile.items())
    )
    with changes_of(database.dsn) as changes:
        fill(database, kinds)
        log = changes()
    texts = stream_columns(list(decode_entries(log.entries, log.schemas, as_text=True)))
    stream = stream_columns(list(decode_entries(log.entries, log.schemas)))
    snapshot, _ = snapshot_columns(database.dsn)
    for i, kind in enumerate(kinds):
        assert texts[f"c{i}"].to_pylist() == before[i], kind
        assert bits(stream[f"c{i}"]) == bits(expected[f"c{i}"]), kind
        assert bits(snapshot[f"c{i}"]) == bits(expected[f"c{i}"]), kind


@pytest.mark.parametrize("pg_server", [15], indirect=True)
def test_a_row_filter_means_the_same_whatever_the_settings_of_the_database_are(
    database: Database,
) -> None:
    """The copy reads its text again: with `array_nulls = off`, NULL in an array's literal is the word."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, c0 text)",
        f"CREATE PUBLICATION {PUBLICATION} FOR TABLE t WHERE (c0 = ANY ('{{a,NULL}}'::text[]))",
        "INSERT INTO t VALUES (1, 'a'), (2, 'NULL'), (3, NULL)",
        *(f"ALTER DATABASE {database.name} SET {name} = on" for name in ("quote_all_identifiers", "transform_null_equals")),
        f"ALTER DATABASE {database.name} SET array_nulls = off",
    )  # fmt: skip
    snapshot, _ = snapshot_columns(database.dsn)
    assert snapshot["c0"].to_pylist() == ["a"]


@pytest.mark.parametrize(("kind", "value"), UNREPRESENTABLE)
def test_26_a_value_that_does_not_fit_is_named_in_stream_and_snapshot(
    database: Database, kind: str, value: str
) -> None:
    kinds = {kind: [value]}
    table(database, kinds)
    with changes_of(database.dsn) as changes:
        fill(database, kinds)
        log = changes()
    with pytest.raises(UnsupportedValueError, match=r"public\.t\.c0"):
        list(decode_entries(log.entries, log.schemas))
    with pytest.raises(UnsupportedValueError, match=r"public\.t\.c0, row 1 of public\.t"):
        snapshot_columns(database.dsn)


def test_24_unchanged_toast_under_each_replica_identity(database: Database) -> None:
    """What the server sends for a value out of line that an update leaves as it is."""
    identities = {"d": "DEFAULT", "f": "FULL", "i": "USING INDEX t_i_code_key"}
    statements = []
    for letter, identity in identities.items():
        statements += [
            f"CREATE TABLE t_{letter} (id int PRIMARY KEY, code int NOT NULL UNIQUE, n int, body text)",
            f"ALTER TABLE t_{letter} ALTER body SET STORAGE EXTERNAL",
            f"ALTER TABLE t_{letter} REPLICA IDENTITY {identity}",
        ]
    tables_ = ", ".join(f"t_{letter}" for letter in identities)
    database.execute(*statements, f"CREATE PUBLICATION {PUBLICATION} FOR TABLE {tables_}")
    body, other = "b" * 10_000, "o" * 10_000
    with changes_of(database.dsn) as changes, database.connect() as connection:
        for letter in identities:
            for statement, values in [
                ("INSERT INTO t_{} VALUES (1, 10, 0, %s)", [body]),
                ("UPDATE t_{} SET n = 1", []),
                ("UPDATE t_{} SET id = 2, code = 20", []),
                ("UPDATE t_{} SET body = %s", [other]),
                ("DELETE FROM t_{}", []),
            ]:
                connection.execute(statement.format(letter).encode(), values)
        log = changes()
    found: dict[str, list[Any]] = {}
    for batch in decode_entries(log.entries, log.schemas):
        for i in range(len(batch)):
            marked = batch.unchanged is not None and batch.unchanged[i].tolist() == [
                *(False, False, False, True)
            ]
            old = (
                None
                if batch.old_columns is None or not batch.old_kind[i]
                else [c[i].as_py() for c in batch.old_columns]
            )
            found.setdefault(batch.relation.name, []).append(
                (chr(batch.ops[i]), batch.columns[3][i].as_py(), marked, old)
            )
    key_d, key_i = [1, None, None, None], [None, 10, None, None]
    assert found["t_d"] == [
        *(("I", body, False, None), ("U", None, True, None), ("U", None, True, key_d)),
        *(("U", other, False, None), ("D", None, False, [2, None, None, None])),
    ]
    assert found["t_i"] == [
        *(("I", body, False, None), ("U", None, True, None), ("U", None, True, key_i)),
        *(("U", other, False, None), ("D", None, False, [None, 20, None, None])),
    ]
    assert found["t_f"] == [
        ("I", body, False, None),
        ("U", body, False, [1, 10, 0, body]),
        ("U", body, False, [1, 10, 1, body]),
        ("U", other, False, [2, 20, 1, body]),
        ("D", None, False, [2, 20, 1, other]),
    ]


@pytest.mark.parametrize("pg_server", [15], indirect=True)
def test_a_row_that_a_filter_lets_in_comes_without_its_unchanged_toast(database: Database) -> None:
    """As an INSERT; with the whole old row the server has the value."""
    for name, identity in (("t_d", "DEFAULT"), ("t_f", "FULL")):
        database.execute(
            f"CREATE TABLE {name} (id int, sent bool, body text, PRIMARY KEY (id, sent))",
            f"ALTER TABLE {name} ALTER body SET STORAGE EXTERNAL",
            f"ALTER TABLE {name} REPLICA IDENTITY {identity}",
            f"INSERT INTO {name} VALUES (1, false, repeat('b', 5000))",
        )
    tables = "t_d WHERE (sent), t_f WHERE (sent)"
    database.execute(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE {tables}")
    with changes_of(database.dsn) as changes:
        database.execute("UPDATE t_d SET sent = true", "UPDATE t_f SET sent = true")
        log = changes()
    bare, whole = decode_entries(log.entries, log.schemas)
    for batch in (bare, whole):
        assert batch.ops.tobytes() == b"I"
    assert bare.unchanged is not None
    assert bare.unchanged.tolist() == [[False, False, True]]
    layout = Layout(0, columns_of(bare.relation))
    told = mismatch(bare, pa.schema([]), layout, ("id", "sent"), bare.relation.oid)
    assert "REPLICA IDENTITY FULL" in str(told)
    assert whole.columns[2].to_pylist() == ["b" * 5000]
    assert whole.unchanged is None


def test_a_deferrable_key_is_no_key(database: Database) -> None:
    # Rows may pass through each other's keys inside a statement; as a bag the table is exact.
    database.execute(
        "CREATE TABLE swapped (id int PRIMARY KEY DEFERRABLE, body text)",
        "CREATE TABLE kept (id int PRIMARY KEY, body text)",
        "CREATE PUBLICATION keys FOR TABLE swapped, kept",
    )
    with ExportedSnapshot(database.dsn) as snapshot:
        found = {table.name: table.key for table in snapshot.tables("keys")}
    assert found == {"swapped": None, "kept": ("id",)}
