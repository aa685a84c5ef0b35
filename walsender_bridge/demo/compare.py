"""Compares a table of the lake with PostgreSQL's, key by key and value by value.

PostgreSQL's rows come through psycopg and the lake's through Spark, as Python values: neither uses
the pipeline's own decoder, so a bug there cannot hide itself. Tables without a key are compared as
multisets: each distinct row has to occur equally often.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from walsender_bridge.runtime.sql import load

#: Types that are text in the lake, or that differ in Python, and the cast that makes both sides comparable.
_CASTS = {"uuid": "text", "jsonb": "text", "json": "text", "real": "float8"}
_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class TableDifference:
    """The differences between PostgreSQL's table and the lake's, counted in rows."""

    table: str
    rows: int
    missing: int
    extra: int
    different: int
    examples: tuple[str, ...] = field(default=())

    @property
    def equal(self) -> bool:
        """No row is missing, extra or different."""
        return not (self.missing or self.extra or self.different)


@dataclass(frozen=True, slots=True)
class TableShape:
    """A table's columns and the positions of its key among them (none: a multiset)."""

    name: str
    columns: tuple[str, ...]
    casts: tuple[str | None, ...]
    key: tuple[int, ...]


def shape_of(connection: psycopg.Connection, table: str) -> TableShape:
    """The shape of `schema.table` as the comparison needs it."""
    rows = connection.execute(load("demo/columns"), {"table": table}).fetchall()
    casts = []
    for _, kind, typmod, _ in rows:
        unbounded = kind == "numeric" and typmod < 0
        casts.append("text" if unbounded else _CASTS.get(kind))
    key = tuple(position for position, row in enumerate(rows) if row[3])
    return TableShape(table, tuple(row[0] for row in rows), tuple(casts), key)


def postgres_rows(connection: psycopg.Connection, shape: TableShape) -> Iterable[tuple[Any, ...]]:
    """All rows of the table, each a tuple of comparable values."""
    columns = [
        sql.SQL("{}::{}").format(sql.Identifier(name), sql.SQL(cast))
        if cast
        else sql.Identifier(name)
        for name, cast in zip(shape.columns, shape.casts, strict=True)
    ]
    query = sql.SQL("SELECT {} FROM {}").format(
        sql.SQL(", ").join(columns), sql.Identifier(*shape.name.split("."))
    )
    return (comparable(row) for row in connection.execute(query))


def comparable(row: Iterable[Any]) -> tuple[Any, ...]:
    """A row whose values can be compared and hashed; NaN equals NaN."""
    return tuple(_comparable(value) for value in row)


def _comparable(value: Any) -> Hashable:
    if isinstance(value, list):
        return tuple(_comparable(item) for item in value)
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return value  # type: ignore[no-any-return]  # psycopg's values are Any


def difference(
    shape: TableShape, expected: Iterable[tuple[Any, ...]], actual: Iterable[tuple[Any, ...]]
) -> TableDifference:
    """The differences of `actual` (the lake) from `expected` (PostgreSQL)."""
    if shape.key:
        return _by_key(shape, expected, actual)
    return _as_multisets(shape, expected, actual)


def _by_key(
    shape: TableShape, expected: Iterable[tuple[Any, ...]], actual: Iterable[tuple[Any, ...]]
) -> TableDifference:
    def key_of(row: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(row[position] for position in shape.key)

    wanted = {key_of(row): row for row in expected}
    missing = set(wanted)
    extra = different = 0
    examples: list[str] = []
    for row in actual:
        key = key_of(row)
        if key not in missing:
            # Not in PostgreSQL, or a duplicate here.
            extra += 1
            examples.append(f"extra {key}")
        elif wanted[key] != row:
            different += 1
            examples.append(f"at {key}: {wanted[key]} in PostgreSQL, {row} in the lake")
        missing.discard(key)
    examples += [f"missing {key}" for key in list(missing)[:_EXAMPLES]]
    return TableDifference(
        shape.name, len(wanted), len(missing), extra, different, tuple(examples[:_EXAMPLES])
    )


def _as_multisets(
    shape: TableShape, expected: Iterable[tuple[Any, ...]], actual: Iterable[tuple[Any, ...]]
) -> TableDifference:
    wanted = Counter(expected)
    found = Counter(actual)
    missing = wanted - found
    extra = found - wanted
    examples = [f"missing {n} of {row}" for row, n in missing.most_common(_EXAMPLES)]
    examples += [f"extra {n} of {row}" for row, n in extra.most_common(_EXAMPLES)]
    return TableDifference(
        shape.name, wanted.total(), missing.total(), extra.total(), 0, tuple(examples[:_EXAMPLES])
    )
