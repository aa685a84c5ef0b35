"""Is a view what PostgreSQL answers to its SQL?"""

from collections import Counter
from datetime import UTC, datetime
from decimal import Decimal

import psycopg

from spark_consumers.lake.views.definition import ViewDefinition
from tests.support.lake_pipeline import dies

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
#: The changes of one epoch each.
CHANGES = (
    (
        "UPDATE docs SET body = repeat('new', 2000), n = 7.125 WHERE id = 1",
        "UPDATE docs SET title = 'again' WHERE id IN (1, 2, 5)",
        "UPDATE docs SET id = CASE id WHEN 4 THEN 5 ELSE 4 END + 100 WHERE id IN (4, 5)",
    ),
    (
        "DELETE FROM docs WHERE id = 6",
        "INSERT INTO docs VALUES (6, 'reborn', NULL, 1.5, 'NaN'), (10, NULL, 'x', NULL, 1), (11, NULL, NULL, 2, 2)",
        "UPDATE pairs SET b = 'z', a = 2 WHERE a = 1",
        "INSERT INTO pairs VALUES (2, 'q', '2024-05-05 00:00:00+00', NULL), (9, 'q', NULL, NULL)",
    ),
    (
        "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE t = 'three')",
        "INSERT INTO bag SELECT * FROM bag",
        "DELETE FROM docs WHERE title IS NULL",
    ),
    ("TRUNCATE pairs", "DELETE FROM docs"),
    ("INSERT INTO docs SELECT g, 't' || g % 3, NULL, g, 0 FROM generate_series(1, 30) g",),
)
#: Of the tables of `bank_load`.
BANK = (
    ViewDefinition("views.rich", "SELECT id, balance FROM accounts WHERE balance > 100"),
    ViewDefinition(
        "views.by_account",
        "SELECT account, count(*) AS moves, sum(amount) AS amount, min(amount) AS low, max(amount) AS high FROM audit GROUP BY account",
    ),
    ViewDefinition(
        "views.large",
        "SELECT a.id, a.balance, m.amount FROM accounts a JOIN audit m ON m.account = a.id WHERE m.amount > 5",
    ),
    ViewDefinition(
        "views.idle",
        "SELECT a.id FROM accounts a LEFT JOIN audit m ON m.account = a.id WHERE m.account IS NULL",
    ),
)


def settings_of(views):
    """The part of a configuration that defines these."""
    return "".join(f'[[lake.view]]\nname = "{v.name}"\nsql = """{v.sql}"""\n' for v in views)


def assert_followed(pipeline, database, monkeypatch, views):
    """Views of the tables of `lake_pipeline` are PostgreSQL's answer after each epoch, and after one in which the driver ended before it was published.

    The house of the pipeline has the views; so has its successor.
    """
    assert_views(database, pipeline.flush(), views)
    database.execute(*CHANGES[0], *CHANGES[1])
    assert_views(database, pipeline.flush(), views)
    database.execute(*CHANGES[2], "TRUNCATE pairs")
    dies(monkeypatch, pipeline, "views-staged", ["INSERT INTO pairs VALUES (2, 'late')"])
    pipeline.house = pipeline.lakehouse(views=views)
    assert_views(database, pipeline.flush(), views)
    kinds = {view.kind for view in pipeline.head().views.values()}
    assert kinds == {"incremental"}


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
