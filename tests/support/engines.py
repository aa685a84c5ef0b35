"""Other engines that read a lake's tables, and whether their rows are PostgreSQL's, value by value.

An engine knows nothing of Tuskline: it opens the metadata file that the lake's catalog names, and reads the plain table.
What PostgreSQL has comes from COPY, in the words of its output functions, so no decoder of ours is between the two.
"""

import importlib
import sqlite3
import struct
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from datetime import UTC
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from psycopg import sql
from pyiceberg.table import StaticTable

from spark_consumers.lake.reader import Snapshot
from tests.support import plain_decoder
from tests.support.pinned import connect_pinned
from tests.support.type_columns import as_own_text

#: Reads the table of a metadata file.
Engine = Callable[[str], pa.Table]


def pyiceberg_rows(metadata: str) -> pa.Table:
    """The table as PyIceberg reads it."""
    return StaticTable.from_metadata(metadata).scan().to_arrow()


def duckdb_rows(metadata: str) -> pa.Table:
    """The table as DuckDB reads it."""
    with closing(connected()) as connection:
        query = "SELECT * FROM iceberg_scan(?)"
        return connection.execute(query, [metadata]).to_arrow_table()


def connected() -> duckdb.DuckDBPyConnection:
    """DuckDB with its Iceberg extension from the environment's packages: nothing is downloaded."""
    off: dict[str, str | bool | int | float | list[str]] = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
    }
    connection = duckdb.connect(config=off)
    packages = ("duckdb_extension_httpfs", "duckdb_extension_avro", "duckdb_extension_iceberg")
    for package in map(importlib.import_module, packages):
        assert package.__file__ is not None
        (file,) = Path(package.__file__).parent.glob("extensions/*/*.duckdb_extension")
        connection.load_extension(str(file))
    connection.execute("SET TimeZone = 'UTC'")
    return connection


ENGINES: dict[str, Engine] = {"PyIceberg": pyiceberg_rows, "DuckDB": duckdb_rows}


def metadata_of(lake: Path) -> dict[str, str]:
    """The metadata file of each table, by `stream.schema.table`, as the lake's catalog names it."""
    with closing(sqlite3.connect(lake / "catalog.db")) as connection:
        rows = connection.execute(
            "SELECT table_namespace, table_name, metadata_location FROM iceberg_tables"
        ).fetchall()
    return {f"{space}.{table}": file for space, table, file in rows}


def assert_read_by_engines(
    dsn: str,
    lake: Path | Mapping[str, str],
    shown: Snapshot,
    engines: Mapping[str, Engine] = ENGINES,
) -> None:
    """Every engine, and our own reader, gives PostgreSQL's columns and rows of the tables shown, and nothing else.

    `lake`: its folder, or the metadata file of each table.
    """
    files, faults = metadata_of(lake) if isinstance(lake, Path) else lake, []
    for name in shown.tables:
        _, schema, table = name.split(".")
        columns, expected = _postgres_rows(dsn, schema, table)
        readers: dict[str, Callable[[], pa.Table]] = {"Spark": shown[name].toArrow}
        readers |= {engine: partial(read, files[name]) for engine, read in engines.items()}
        for reader, read in readers.items():
            try:
                fault = _fault(columns, expected, read())
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
            if fault:
                faults.append(f"{name} in {reader}: {fault[:1000]}")
    assert not faults, "\n".join(faults)


def fault_of(dsn: str, name: str, found: pa.Table) -> str:
    """What is wrong with these rows of the table `stream.schema.table`; nothing if they are PostgreSQL's."""
    _, schema, table = name.split(".")
    return _fault(*_postgres_rows(dsn, schema, table), found)


def has_same_rows(one: pa.Table, other: pa.Table) -> bool:
    """Whether these have the same columns, types and rows."""
    return (
        one.schema.names == other.schema.names
        and one.schema.types == other.schema.types
        and _values(one) == _values(other)
    )


def assert_engines_agree(lake: Path, shown: Snapshot) -> None:
    """Every engine gives the rows that our own reader gives."""
    files = metadata_of(lake)
    for name in shown.tables:
        expected = _values(shown[name].toArrow())
        for engine, read in ENGINES.items():
            assert _values(read(files[name])) == expected, f"{name} in {engine}"


def _values(found: pa.Table) -> Counter[tuple[Hashable, ...]]:
    """The rows, in a form that is equal for equal values."""
    rows = zip(*(column.to_pylist() for column in found.columns), strict=True)
    return Counter(tuple(map(_of_value, row, found.schema.types)) for row in rows)


def _fault(columns: list[str], expected: Sequence[tuple[str | None, ...]], found: pa.Table) -> str:
    """What is wrong with the rows found; nothing if they are those expected."""
    if found.column_names != columns:
        return f"columns {found.column_names} instead of {columns}"
    kinds = found.schema.types
    wanted = Counter(tuple(map(_of_text, row, kinds)) for row in expected)
    there = _values(found)
    if there == wanted:
        return ""
    missing, extra = wanted - there, there - wanted
    return (
        f"{missing.total()} of {len(expected)} rows are missing: {_examples(missing)},"
        f" {extra.total()} are there besides: {_examples(extra)}"
    )


def _examples(rows: Counter[tuple[Hashable, ...]]) -> str:
    return str([tuple(value for value in row if value is not None) for row in list(rows)[:3]])


def _postgres_rows(dsn: str, schema: str, table: str) -> tuple[list[str], list[Any]]:
    with connect_pinned(dsn) as connection:
        name = sql.Identifier(schema, table)
        empty = connection.execute(sql.SQL("SELECT * FROM {} LIMIT 0").format(name))
        columns = [column.name for column in empty.description or ()]
        copy = sql.SQL("COPY (SELECT * FROM {}) TO STDOUT").format(name)
        with connection.cursor().copy(copy) as lines:
            return columns, list(lines.rows())


def _of_text(text: str | None, kind: pa.DataType) -> Hashable:
    """PostgreSQL's text of a value, so that it equals `_of_value` of the same value."""
    if text is None:
        return None
    if pa.types.is_floating(kind):
        return _bits(float(text), kind)
    if pa.types.is_list(kind):
        return tuple(_of_text(item, kind.value_type) for item in plain_decoder.array(text))
    return text


def _of_value(value: Any, kind: pa.DataType) -> Hashable:
    if value is None:
        return None
    if pa.types.is_floating(kind):
        return _bits(value, kind)
    if pa.types.is_list(kind):
        return tuple(_of_value(item, kind.value_type) for item in value)
    if pa.types.is_timestamp(kind) and kind.tz:
        # Of several engines, each chooses the zone in which it shows a moment.
        return as_own_text(value.astimezone(UTC), kind)
    return as_own_text(value, kind)


def _bits(value: float, kind: pa.DataType) -> bytes:
    """All bits of a number count: -0 is not 0. NaN is itself."""
    return struct.pack("f" if pa.types.is_float32(kind) else "d", value)
