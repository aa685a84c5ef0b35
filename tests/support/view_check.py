"""Is a view what PostgreSQL answers to its SQL?"""

from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal

import psycopg

from spark_consumers.lake.views.definition import ViewDefinition

#: Of the tables of `lake_pipeline`.
FLAT = ViewDefinition("views.titles", "SELECT id, title, n * 2 AS twice FROM docs WHERE id <> 3")
BY_TITLE = ViewDefinition(
    "views.by_title",
    "SELECT title, count(*) AS docs, sum(id) AS ids, sum(n), min(id) AS least, max(id) AS most, avg(id) AS mean,"
    " round(avg(n), 2) AS mean_n, count(body) FILTER (WHERE id > 2) AS bodies FROM docs GROUP BY title",
)
TOTAL = ViewDefinition(
    "views.total", "SELECT count(*) AS docs, sum(n) AS n, max(n) AS most FROM docs"
)
JOINED = ViewDefinition(
    "views.joined",
    "SELECT d.id, d.title, p.b, p.at FROM docs d JOIN pairs p ON p.a = d.id",
)
OUTER = ViewDefinition(
    "views.outer", "SELECT d.id, p.b FROM docs d LEFT JOIN pairs p ON p.a = d.id"
)
BAG = ViewDefinition("views.bag", "SELECT DISTINCT a, t FROM bag")
VIEWS = (FLAT, BY_TITLE, TOTAL, JOINED, OUTER, BAG)


def assert_views(database, snapshot, views, *, counted=True):
    """Every view of the snapshot has the rows that PostgreSQL, which must not change meanwhile, answers now.

    And as many as the manifest says, if it has `counted` them.
    """
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        for view in views:
            assert view.name in snapshot, snapshot.manifest.views.get(view.name)
            expected = answer(connection, view.sql)
            assert_same(view, expected, snapshot[view.name])
            table = snapshot.manifest.views[view.name].table
            assert table is not None
            assert not counted or table.rows == len(expected)


def assert_views_of_epoch(database, snapshot, views):
    """Every view has the rows that PostgreSQL answers over the tables of the same snapshot."""
    with psycopg.connect(database.dsn) as connection:
        connection.execute("CREATE SCHEMA replayed")
        for full in snapshot.manifest.tables:
            name = full.rpartition(".")[2]
            connection.execute(
                f"CREATE TABLE replayed.{name} (LIKE public.{name} INCLUDING IDENTITY)"
            )
            frame = snapshot[full]
            with connection.cursor().copy(
                f"COPY replayed.{name} ({', '.join(frame.columns)}) FROM STDIN"
            ) as copy:
                for row in frame.collect():
                    copy.write_row(row)
        connection.execute("SET search_path = replayed")
        for view in views:
            assert_same(view, answer(connection, view.sql), snapshot[view.name])
        connection.rollback()


def assert_same(view, expected, frame):
    """The rows of a frame are these, as a multiset."""
    moments = [kind == "timestamp" for _, kind in frame.dtypes]
    found = Counter(tuple(map(_plain, row, moments)) for row in frame.collect())
    wanted = Counter(tuple(map(_plain, row, [False] * len(row))) for row in expected)
    assert found == wanted, (view.name, found - wanted, wanted - found)


def answer(connection, sql):
    """PostgreSQL's rows."""
    connection.execute("SET TimeZone = 'UTC'")
    return connection.execute(sql).fetchall()


def _plain(value, is_moment):
    """A value that is equal in both: a numeric that is kept as text is one."""
    if is_moment and value is not None:
        return value.astimezone(UTC)
    if isinstance(value, str):
        return _number(value)
    if isinstance(value, Decimal):
        return _number(str(value))
    if isinstance(value, float):
        return repr(value + 0.0)
    if isinstance(value, datetime):
        return value if value.tzinfo is None else value.astimezone(UTC)
    if isinstance(value, list):
        return tuple(value)
    return bytes(value) if isinstance(value, bytearray | memoryview) else value


def _number(text):
    try:
        return Decimal(text)
    except ArithmeticError:
        return text
