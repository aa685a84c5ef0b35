"""Thirty wide tables of every type, through log server, bridge and lake: first copied, then streamed."""

import random

import pytest
from psycopg import sql

from spark_consumers import read
from tests.support.pinned import connect_pinned
from tests.support.stack import Stack
from tests.support.type_columns import Kind, Kinds, same
from tests.support.waiting import wait_for

WIDTH, ROWS = 40, 6


def kinds_of(types: Kinds, number: int, tables: int) -> list[Kind]:
    """Every type once, over all tables; the rest of each table's columns at random."""
    every = [Kind(*one) for one in sorted({**types.typed, **types.textual}.items())]
    kinds = every[number::tables]
    while len(kinds) < WIDTH:
        kind = types.any()
        # What a list cannot hold is for the quarantine.
        if not kind.as_list:
            kinds.append(kind)
    return kinds


def fill(database, tables, draw, rows):
    with connect_pinned(database.dsn) as connection:
        for number, kinds in enumerate(tables):
            with connection.cursor().copy(f"COPY t{number} FROM STDIN".encode()) as copy:
                for row in rows:
                    values = [kind.values(draw) if draw.random() < 0.9 else None for kind in kinds]
                    copy.write_row([str(row), *values])


def own(connection, number):
    """The table's rows as PostgreSQL writes them."""
    query = sql.SQL("COPY (SELECT * FROM {} ORDER BY id) TO STDOUT").format(
        sql.Identifier(f"t{number}")
    )
    with connection.cursor().copy(query) as lines:
        return list(lines.rows())


# `make test` has wide tables in the type tests of capture and of the fold.
@pytest.mark.long
@pytest.mark.parametrize("count", [4, 30])
@pytest.mark.timeout(600)
def test_23_thirty_wide_tables_through_snapshot_and_stream(spark, tmp_path, database, seed, count):
    print(f"seed {seed}")
    draw = random.Random(seed)
    with database.connect() as connection:
        types = Kinds(connection, draw)
        tables = [kinds_of(types, number, count) for number in range(count)]
        for number, kinds in enumerate(tables):
            columns = ", ".join(f"c{i} {kind.ddl}" for i, kind in enumerate(kinds))
            connection.execute(f"CREATE TABLE t{number} (id int PRIMARY KEY, {columns})".encode())
    fill(database, tables, draw, range(ROWS))
    with Stack(tmp_path, {"shop": database.dsn}) as stack:
        stack.start("log-server", "bridge", "lake")

        def copied():
            result = stack.cli("flush", "--json")
            return result.returncode == 0 and len(read(spark, stack.lake).tables) == count

        wait_for(copied, 240, "the copies")
        copy = read(spark, stack.lake)
        # The same columns again as changes: new rows, and half of the copied ones replaced.
        fill(database, tables, draw, range(ROWS, 2 * ROWS))
        with connect_pinned(database.dsn) as connection:
            for number, kinds in enumerate(tables):
                names = sql.SQL(", ").join(sql.Identifier(f"c{i}") for i in range(len(kinds)))
                connection.execute(
                    sql.SQL(
                        "UPDATE {table} AS t SET ({names}) = (SELECT {names} FROM {table} AS s"
                        " WHERE s.id = t.id + %s) WHERE t.id < 3"
                    ).format(table=sql.Identifier(f"t{number}"), names=names),
                    [ROWS],
                )
        assert stack.cli("flush").returncode == 0
        snapshot = read(spark, stack.lake)
        assert snapshot.epoch > copy.epoch
        with connect_pinned(database.dsn) as connection:
            for number, kinds in enumerate(tables):
                compare(snapshot[f"t{number}"], kinds, own(connection, number))


def compare(frame, kinds, expected):
    """What Spark reads of the table is what PostgreSQL writes, column by column."""
    found = frame.toArrow().sort_by("id")
    assert found["id"].to_pylist() == [int(row[0]) for row in expected]
    for i, kind in enumerate(kinds):
        column = found[f"c{i}"]
        for value, row in zip(column.to_pylist(), expected, strict=True):
            assert same(value, row[i + 1], column.type), (kind.ddl, value, row[i + 1])
