"""Schema changes that an event trigger records: the table follows them in place, and nothing is copied."""

import copy
import json
import os
import random
import re
from contextlib import suppress
from pathlib import Path

import pytest
from psycopg import sql

from spark_consumers import read
from spark_consumers.lake.epoch import epoch_writer as epoch_module
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.writer import requests
from tests.cluster.test_types import SETUP, TEXTUAL, TYPED
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.engines import assert_read_by_engines
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import Pipeline, dies
from tests.support.pinned import connect_pinned
from tests.support.sizes import need_disk, scaled
from tests.support.table_format import ICEBERG
from tests.support.waiting import wait_for
from walsender_bridge.runtime.sql import load

BAG, DOCS, PAIRS = (f"{STREAM}.public.{name}" for name in ("bag", "docs", "pairs"))


def paths(pipeline):
    """Where each table of the newest link is: a table that is copied again gets a place of its own."""
    return {name: table.path for name, table in pipeline.head().tables.items()}


def install(database):
    database.execute(load("ddl/install"))
    publish = sql.SQL(load("ddl/publish")).format(publication=sql.Identifier(PUBLICATION))
    database.execute(publish.as_string(None))


@pytest.fixture
def recorded(pipeline, database):
    install(database)
    pipeline.flush()
    pipeline.house.run_once()
    assert all(is_recorded(table) for table in pipeline.head().tables.values())
    return pipeline


def is_recorded(table):
    return bool(json.loads(table.shape)["recorded"])


def test_14_renamed_and_dropped_columns_are_followed_in_place(recorded, database, monkeypatch):
    monkeypatch.setattr(epoch_module, "_COMPACT_FILES", 2)
    before, old = paths(recorded), recorded.flush()
    # Between changes of one transaction, of rows that are older and of new ones.
    database.execute(
        "BEGIN; UPDATE docs SET n = 77 WHERE id = 2; ALTER TABLE docs RENAME title TO heading;"
        " UPDATE docs SET heading = 'x' WHERE id = 1; ALTER TABLE docs DROP f, ADD extra int;"
        " INSERT INTO docs VALUES (50, 'h', 'b', 1, 2); ALTER TABLE docs RENAME id TO number;"
        " UPDATE docs SET number = 51 WHERE number = 50; UPDATE pairs SET a = 9 WHERE b = 'x'; COMMIT",
        "BEGIN; DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag); ALTER TABLE bag DROP f;"
        " DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag); ALTER TABLE bag RENAME l TO last; COMMIT",
    )
    changed = recorded.flush()
    assert paths(recorded) == before
    assert_equal(database.dsn, changed)
    assert changed["docs"].columns == ["number", "heading", "body", "n", "extra"]
    assert changed["bag"].columns == ["a", "t", "last"]
    assert changed.manifest.tables[DOCS].key == ("number",)
    # A reader who holds on to an older epoch keeps its columns, and another who asks for it gets them.
    for snapshot in (old, read(recorded.spark, recorded.lake, epoch=old.epoch)):
        assert snapshot["docs"].columns == ["id", "title", "body", "n", "f"]
        assert snapshot["bag"].columns == ["a", "f", "t", "l"]
    # What was never sent, equal rows, and rewriting find their values in files with the earlier columns.
    for turn in range(4):
        database.execute(
            f"UPDATE docs SET heading = 'kept {turn}' WHERE number IN (3, {turn + 4})",
            "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag)",
            f"INSERT INTO bag (a) VALUES ({turn})",
        )
        assert_equal(database.dsn, recorded.flush())
    assert list(recorded.lake.glob("tables/*/*/*/data/*-rewritten-*"))
    assert paths(recorded) == before
    assert_no_orphans(recorded.spark, recorded.lake)


def reasons_since(pipeline, link):
    """Why tables were copied again after this link."""
    links = [m for m in open_chain(pipeline.lake).links() if m.link > link]
    return {t.reason for m in links for t in m.tables.values() if t.reason}


def test_14_names_that_pass_from_one_column_to_another_take_no_values_along(recorded, database):
    before = paths(recorded)
    database.execute(
        # A swap; a column under the name of another; one that comes and goes; and an idle table.
        "BEGIN; ALTER TABLE docs RENAME title TO x; ALTER TABLE docs RENAME body TO title; ALTER TABLE docs RENAME x TO body;"
        " UPDATE docs SET title = 'new' WHERE id = 1; COMMIT",
        "BEGIN; UPDATE docs SET n = 5 WHERE id = 2; ALTER TABLE docs DROP n; ALTER TABLE docs ADD n numeric(10, 2);"
        " UPDATE docs SET n = 6 WHERE id = 3; ALTER TABLE docs ADD y int; UPDATE docs SET y = 1; ALTER TABLE docs DROP y;"
        " ALTER TABLE docs ADD y int; UPDATE docs SET y = 2 WHERE id = 4; COMMIT",
        "ALTER TABLE pairs RENAME b TO bb",
    )
    changed = recorded.flush()
    assert_equal(database.dsn, changed)
    assert changed["docs"].columns == ["id", "body", "title", "f", "n", "y"]
    assert "bb" in changed["pairs"].columns
    assert paths(recorded) == before


def test_14_wider_types_copy_nothing(recorded, database):
    database.execute(
        "ALTER TABLE docs ADD s int2, ADD r real, ADD v varchar(5), ADD i int",
        "UPDATE docs SET s = -id, r = 1.1, v = 'v', i = 2147483647",
        "ALTER TABLE bag ADD i int, ADD r real",
        "UPDATE bag SET i = -7, r = 0.1 WHERE t = 'three'",
    )
    recorded.flush()
    before = paths(recorded)
    database.execute(
        # Each by itself, as most clients send them.
        "BEGIN",
        "UPDATE docs SET i = 3 WHERE id = 1",
        "ALTER TABLE docs ALTER id TYPE bigint, ALTER i TYPE bigint, ALTER v TYPE text",
        "COMMIT",
        "UPDATE docs SET id = id + 5000000000, i = 5000000000 WHERE id IN (2, 3)",
        "ALTER TABLE docs ALTER r TYPE double precision",
        "ALTER TABLE docs ALTER COLUMN s SET DATA TYPE int",
        "UPDATE docs SET v = repeat('long', 50) WHERE id = 4",
        "ALTER TABLE bag ALTER i TYPE bigint, ALTER r TYPE float8",
        "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE i = -7)",
    )
    for turn in range(2):
        assert_equal(database.dsn, recorded.flush())
        assert paths(recorded) == before
        database.execute(
            f"UPDATE docs SET title = 'kept {turn}' WHERE id IN (1, 5, 5000000002)",
            "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag)",
        )
    link = recorded.head().link
    database.execute("ALTER TABLE docs ALTER s TYPE bigint USING s + 1")
    recorded.flush()
    assert_equal(database.dsn, recorded.flush())
    assert any("another type" in reason for reason in reasons_since(recorded, link))
    assert paths(recorded)[DOCS] != before[DOCS]


#: A type whose values PostgreSQL delimits by semicolons, and domains.
NOT_KEPT = {
    "box",
    *(
        "positive",
        "small",
        "code",
        "codes",
        "price",
        "address",
        "feeling",
        "feelings",
        "couple",
        "span",
    ),
}


def literals():
    """A default of each type that can have one in the table's schema."""
    found = {k: v[-1] for k, v in {**TYPED, **TEXTUAL}.items() if k not in NOT_KEPT}
    plain = {k: v for k, v in found.items() if not k.endswith("[]") or k in TEXTUAL}
    return {**plain, "numeric": "1" * 500, "numeric(39,2)": "-0.10"}


@pytest.mark.iceberg_only("Delta refuses a default for older rows by name")
def test_14_defaults_of_new_columns_copy_nothing_and_every_engine_reads_them(
    recorded, database, monkeypatch
):
    monkeypatch.setattr(epoch_module, "_COMPACT_FILES", 2)
    with connect_pinned(database.dsn) as connection:
        for statement in SETUP:
            connection.execute(statement)
    before, old = paths(recorded), recorded.flush()
    added = [
        f"ADD c{number} {kind} NOT NULL DEFAULT {quoted(value)}"
        for number, (kind, value) in enumerate(literals().items())
    ]
    database.execute(
        # Rows that are older, that came before the command in its transaction, and that bring the column along.
        "BEGIN; INSERT INTO docs VALUES (50, 'h', 'b', 1, 2); UPDATE docs SET title = 'early' WHERE id = 3;"
        f" ALTER TABLE docs {', '.join(added)}; UPDATE docs SET title = 'late' WHERE id = 4;"
        " INSERT INTO docs (id, c1) VALUES (51, 77); ALTER TABLE docs ALTER c1 SET DEFAULT 5; INSERT INTO docs (id) VALUES (52); COMMIT",
        "BEGIN; DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag); ALTER TABLE bag ADD at timestamptz DEFAULT now(), ADD r real DEFAULT 0.1;"
        " DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag); INSERT INTO bag (a) VALUES (4); COMMIT",
        "ALTER TABLE pairs ADD note varchar(9) DEFAULT 'none'",
    )
    changed = recorded.flush()
    assert paths(recorded) == before
    assert_read_by_engines(database.dsn, recorded.lake, changed)
    assert "c1" not in read(recorded.spark, recorded.lake, epoch=old.epoch)["docs"].columns
    # The column's field keeps its value under another name and by a wider type.
    database.execute("ALTER TABLE bag ALTER r TYPE float8", "ALTER TABLE pairs RENAME note TO said")
    for turn in range(4):
        assert_read_by_engines(database.dsn, recorded.lake, recorded.flush(), {})
        database.execute(
            f"UPDATE docs SET title = 'kept {turn}' WHERE id IN (5, {turn + 5})",
            "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag)",
            f"INSERT INTO bag (a) VALUES ({turn})",
        )
    changed = recorded.flush()
    assert list(recorded.lake.glob("tables/*/*/*/data/*-rewritten-*"))
    assert paths(recorded) == before
    assert_read_by_engines(database.dsn, recorded.lake, changed)
    for condition in ("said = 'none'", "said IS NULL", "said IS NOT NULL", "said > 'a'"):
        assert changed["pairs"].where(condition).count() == counted(database, "pairs", condition)
    assert_no_orphans(recorded.spark, recorded.lake)


def quoted(text):
    return sql.Literal(text).as_string(None)


def request_resync(pipeline, table):
    requests.ask(open_chain(pipeline.lake), "resync", [f"{STREAM}.public.{table}"])
    path = paths(pipeline)
    wait_for(lambda: pipeline.house.run_once() or paths(pipeline) != path, 60, "copied again")


def counted(database, table, condition):
    with database.connect() as connection:
        query = f"SELECT count(*) FROM {table} WHERE {condition}"
        return connection.execute(query.encode()).fetchone()[0]


@pytest.mark.iceberg_only("Delta refuses a default for older rows by name")
def test_14_an_attempt_that_was_not_published_leaves_no_other_default(
    recorded, database, monkeypatch
):
    before = paths(recorded)
    database.execute("ALTER TABLE docs ADD c int DEFAULT 7")

    dies(monkeypatch, recorded, "before-manifest")
    recorded.house = recorded.lakehouse()
    database.execute("ALTER TABLE docs DROP c; ALTER TABLE docs ADD c int DEFAULT 8")
    assert_equal(database.dsn, recorded.flush())
    assert paths(recorded) == before


@pytest.mark.iceberg_only("Delta refuses a default for older rows by name")
def test_14_a_table_in_version_2_of_the_format_is_copied_for_a_default(recorded, database):
    recorded.house.close()
    recorded.house = recorded.lakehouse(deletes={"default": "position-deletes"})
    request_resync(recorded, "docs")
    before, link = paths(recorded), recorded.head().link
    # A table that is in version 3 stays there.
    database.execute(
        "ALTER TABLE docs ADD c int DEFAULT 7", "ALTER TABLE pairs ADD c int DEFAULT 7"
    )
    recorded.flush()
    after = recorded.flush()
    assert_equal(database.dsn, after)
    assert_read_by_engines(database.dsn, recorded.lake, after)
    assert {name for name, path in paths(recorded).items() if path != before[name]} == {DOCS}
    assert any("version 3 of Iceberg" in reason for reason in reasons_since(recorded, link))


def test_14_what_a_savepoint_takes_back_is_no_change(recorded, database):
    before = paths(recorded)
    database.execute(
        "CREATE FUNCTION alter_docs() RETURNS void LANGUAGE plpgsql AS $$ BEGIN"
        " ALTER TABLE docs RENAME title TO named; UPDATE docs SET named = 'f' WHERE id = 1; END $$",
        "BEGIN; SAVEPOINT s; ALTER TABLE docs DROP body; UPDATE docs SET n = 1 WHERE id = 1; ROLLBACK TO s;"
        " UPDATE docs SET n = 2 WHERE id = 1; SAVEPOINT t; ALTER TABLE docs RENAME f TO ff; RELEASE t;"
        " UPDATE docs SET ff = 3 WHERE id = 2; COMMIT",
        "CREATE ROLE ddl_owner; CREATE TEMP TABLE temp (a int); ALTER TABLE temp RENAME a TO b",
        "ALTER TABLE docs OWNER TO ddl_owner; GRANT ALL ON SCHEMA public TO ddl_owner",
        "BEGIN; SET LOCAL SESSION AUTHORIZATION ddl_owner; SELECT alter_docs(); ALTER TABLE docs ADD own int; COMMIT",
        "BEGIN; SET LOCAL session_replication_role = replica; ALTER TABLE docs RENAME own TO theirs; COMMIT",
        "BEGIN; ALTER TABLE docs DROP theirs; ROLLBACK",
    )
    changed = recorded.flush()
    database.execute(
        "ALTER TABLE docs OWNER TO CURRENT_USER; DROP OWNED BY ddl_owner; DROP ROLE ddl_owner"
    )
    assert_equal(database.dsn, changed)
    assert changed["docs"].columns == ["id", "named", "body", "n", "ff", "theirs"]
    assert paths(recorded) == before
    with database.connect() as connection:
        assert connection.execute("SELECT count(*) FROM tuskline.ddl").fetchone() == (0,)


def test_14_a_change_while_nothing_recorded_causes_a_copy(recorded, database):
    for number, (off, on) in enumerate(
        (
            (
                "ALTER EVENT TRIGGER tuskline_ddl DISABLE",
                "ALTER EVENT TRIGGER tuskline_ddl ENABLE ALWAYS",
            ),
            ("DROP TABLE tuskline.ddl", load("ddl/install")),
        )
    ):
        before, link = paths(recorded), recorded.head().link
        database.execute(
            off,
            f"BEGIN; ALTER TABLE docs ALTER n TYPE numeric(10, 2) USING n + 1, ADD c{number} int DEFAULT 7; COMMIT",
            on,
            "ALTER TABLE docs RENAME title TO heading"
            if number == 0
            else "ALTER TABLE docs DROP heading",
            "UPDATE docs SET body = 'touched' WHERE id = 1",
        )
        recorded.flush()
        after = recorded.flush()
        assert_equal(database.dsn, after)
        assert after.manifest.tables[DOCS].path != before[DOCS]
        assert reasons_since(recorded, link)


def test_14_a_column_that_goes_without_alter_table_causes_a_copy(recorded, database):
    before, link = paths(recorded), recorded.head().link
    database.execute(
        "CREATE TYPE mood AS ENUM ('good')",
        "ALTER TABLE docs ADD feels mood",
        "UPDATE docs SET feels = 'good'",
    )
    recorded.flush()
    assert paths(recorded) == before
    database.execute("DROP TYPE mood CASCADE")
    for _ in range(3):
        database.execute("INSERT INTO pairs SELECT max(a) + 1, 'more' FROM pairs")
        after = recorded.flush()
    assert_equal(database.dsn, after)
    assert paths(recorded)[DOCS] != before[DOCS]
    assert any("has not recorded" in reason for reason in reasons_since(recorded, link))


@pytest.mark.parametrize("point", ["staged", "before-manifest", "after-manifest"])
def test_14_a_writer_that_dies_over_a_change_leaves_it_to_the_next(
    recorded, database, monkeypatch, point
):
    before = paths(recorded)
    change = "BEGIN; ALTER TABLE docs RENAME title TO heading; ALTER TABLE docs DROP f, ADD g int; UPDATE docs SET g = 1 WHERE id = 1; COMMIT"
    database.execute(change, "ALTER TABLE bag DROP f")

    dies(monkeypatch, recorded, point)
    recorded.house = recorded.lakehouse()
    # The range is another one, too.
    database.execute(
        "ALTER TABLE docs RENAME heading TO head", "UPDATE docs SET head = 'x' WHERE id = 2"
    )
    assert_equal(database.dsn, recorded.flush())
    assert paths(recorded) == before
    assert_no_orphans(recorded.spark, recorded.lake)


@pytest.mark.parametrize(
    "number", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 8))]
)
def test_14_random_changes_between_random_rows_equal_postgresql_at_each_epoch(
    recorded, database, request, number, table_format
):
    """All is followed in place, but for the changes that cause a copy, each of which has its reason."""
    seed = int(request.config.getoption("--seed")) * 1000 + number
    draw = random.Random(seed)
    # Delta cannot read a column that has a default for older rows: its tables are refused by name then (docs/delta.md).
    written = RandomChanges(draw, copies=number % 2 == 1, defaults=table_format == ICEBERG)
    copies, caused, link = 0, 0, recorded.head().link
    names = {"docs": "docs", "bag": "bag"}

    def path_of(table):
        return paths(recorded)[f"{STREAM}.public.{names[table]}"]

    for epoch in range(6):
        before = {table: path_of(table) for table in names}
        transactions = [written.transaction() for _ in range(draw.randint(2, 6))]
        swapped = None if written.causes else draw.choice((None, *range(len(transactions))))
        statements = []
        for at, transaction in enumerate(transactions):
            if at == swapped:
                names = {"docs": names["bag"], "bag": names["docs"]}
                statements.append(SWAP)
            statements += [named(each, names) for each in transaction]
        print(f"seed {seed}, epoch {epoch}: {statements}")
        database.execute(*statements)
        assert_equal(database.dsn, recorded.flush())
        copied = {table for table in names if path_of(table) != before[table]}
        # Several changes of one epoch cause one copy; tables that swap their names, none.
        assert copied == {table for table, _ in written.causes}, written.causes
        copies += len(copied)
        caused += len(written.causes)
        written.causes = set()
    reasons = reasons_since(recorded, link)
    print(
        f"seed {seed}: {written.changes} changes, {caused} cause {copies} copies: {sorted(reasons)}"
    )
    assert written.changes > 4
    assert all(any(words in reason for words in EXPECTED) for reason in reasons), reasons
    assert bool(reasons) == bool(copies)
    assert written.copies or not copies


def named(statement, names):
    """The statement, of the tables by the names that they have by now."""
    return re.sub("docs|bag", lambda found: names[found[0]], statement)


#: Exchanges the names of two tables.
SWAP = "BEGIN; ALTER TABLE docs RENAME TO other; ALTER TABLE bag RENAME TO docs; ALTER TABLE other RENAME TO bag; COMMIT"
#: What the reasons of copies may contain that `RandomChanges` causes.
EXPECTED = (
    "was added with a default that the server does not keep",
    "by a command that is not known to keep all values",
    "its rows were rewritten",
)


def bytes_read():
    """What this process and each of those below it has read so far, by system calls; without the server, which rewrites the table."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, rest = stat.read_text().rpartition(")")
            if "(postgres" not in name:
                children.setdefault(int(rest.split()[1]), []).append(int(stat.parent.name))
    below, found = [os.getpid()], {}
    while below:
        pid = below.pop()
        below += children.get(pid, ())
        with suppress(OSError):
            found[pid] = int(Path(f"/proc/{pid}/io").read_text().split()[1])
    return found


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.iceberg_only("Delta refuses a default for older rows by name")
def test_14_changes_of_a_large_table_read_and_write_none_of_its_rows(spark, tmp_path, database):
    """10 GB, with `TUSKLINE_TEST_SCALE=1`: a rename, a drop, wider types and a default."""
    megabytes = scaled(10_000)
    need_disk(tmp_path, 3 * megabytes)
    rows = megabytes * 1000
    database.execute(
        "CREATE TABLE large (id bigint PRIMARY KEY, i int, r real, n numeric(10, 2), a text, b text)",
        "INSERT INTO large SELECT g, g, g, g % 1000, md5(g::text) || md5((g + 1)::text), x.b"
        f" FROM generate_series(1, {rows}) AS g"
        " CROSS JOIN LATERAL (SELECT string_agg(md5((g * 31 + k)::text), '') AS b FROM generate_series(1, 28) AS k) AS x",
    )
    large = f"{STREAM}.public.large"
    with Pipeline(spark, tmp_path, database, ("public.large",)) as pipeline:
        install(database)
        pipeline.wait_for_tables("large")
        pipeline.flush()
        pipeline.house.run_once()
        assert is_recorded(pipeline.head().tables[large])
        folder = pipeline.lake / paths(pipeline)[large]

        def sizes():
            return {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}

        def scans():
            with database.connect() as connection:
                query = (
                    "SELECT coalesce(seq_scan, 0) FROM pg_stat_user_tables WHERE relname = 'large'"
                )
                return connection.execute(query).fetchone()[0]

        before, there, link = paths(pipeline), sizes(), pipeline.head().link
        data = sum(size for file, size in there.items() if file.suffix == ".parquet")
        # The first change loads code, also where it reads no row.
        database.execute("ALTER TABLE large RENAME a TO first")
        pipeline.flush()
        begun = bytes_read()
        for statement in (
            "ALTER TABLE large RENAME first TO text",
            "ALTER TABLE large DROP b",
            "ALTER TABLE large ADD given int DEFAULT 7, ADD at timestamptz DEFAULT now()",
        ):
            database.execute(statement)
            pipeline.flush()
        scanned = scans()
        database.execute(
            "ALTER TABLE large ALTER i TYPE bigint, ALTER r TYPE float8",
            "ALTER TABLE large ALTER n TYPE numeric(12, 2)",
        )
        changed = pipeline.flush()
        # A process that has ended meanwhile, as an idle worker of Spark does, takes nothing from what the others have read.
        read_bytes = sum(now - begun.get(pid, 0) for pid, now in bytes_read().items())
        written = sum(size for file, size in sizes().items() if file not in there)
        print(
            f"data files {data}, read {read_bytes}, written {written}, seq_scan {scanned}, {scans()}"
        )
        assert paths(pipeline) == before
        assert not reasons_since(pipeline, link)
        assert {f for f in sizes() if f.suffix == ".parquet"} == {
            f for f in there if f.suffix == ".parquet"
        }
        assert written < 1_000_000
        assert read_bytes < max(data / 10, 200_000_000)
        found = changed["large"].selectExpr("count(*)", "sum(given)", "sum(i)", "max(n)").collect()
        assert tuple(map(int, found[0])) == (rows, 7 * rows, rows * (rows + 1) // 2, 999)
        assert changed["large"].columns == ["id", "i", "r", "n", "text", "given", "at"]


class RandomChanges:
    """Random DDL between random DML on `docs`, which has a key, and `bag`, which has none.

    `copies`: some of it copies a table; `causes`: which of that was committed, as table and kind. `defaults`: columns are added with
    defaults, too.
    """

    def __init__(self, draw, *, copies, defaults):
        self.draw, self.copies, self.defaults = draw, copies, defaults
        self.columns = {"docs": ["id", "title", "body", "n", "f"], "bag": ["a", "f", "t", "l"]}
        self.texts = {"docs": {"title", "body"}, "bag": {"t"}}
        #: Columns that can get a wider type, and that type.
        self.wider = {"docs": {"id": "bigint"}, "bag": {"a": "bigint"}}
        self.key = "id"
        self.causes = set()
        self.next, self.changes, self.row = 0, 0, 100

    def state(self):
        return copy.deepcopy((self.columns, self.texts, self.wider, self.key, self.causes))

    def transaction(self):
        parts = [
            self.draw.choice((self.rows, self.rows, self.change))()
            for _ in range(self.draw.randint(1, 5))
        ]
        kept = self.state()
        undone = [self.draw.choice((self.rows, self.change))() for _ in range(2)]
        self.columns, self.texts, self.wider, self.key, self.causes = kept
        return ["BEGIN", *parts, "SAVEPOINT s", *undone, "ROLLBACK TO s", self.rows(), "COMMIT"]

    def rows(self):
        table = self.draw.choice(("docs", "bag"))
        texts = sorted(self.texts[table])
        kind = self.draw.choice(("insert", "update", "delete"))
        if kind == "insert":
            self.row += 1
            if table == "docs":
                return f"INSERT INTO docs ({self.key}) VALUES ({self.row})"
            return (
                f"INSERT INTO bag ({texts[0]}) VALUES ('r{self.row % 4}')"
                if texts
                else "INSERT INTO bag DEFAULT VALUES"
            )
        where = f"ctid IN (SELECT ctid FROM {table} ORDER BY ctid OFFSET {self.draw.randint(0, 5)} LIMIT 2)"
        if kind == "delete":
            return f"DELETE FROM {table} WHERE {where}"
        if not texts:
            return "SELECT 1"
        return f"UPDATE {table} SET {self.draw.choice(texts)} = 'v{self.draw.randint(0, 9)}' WHERE {where}"

    def change(self):
        table = self.draw.choice(("docs", "bag"))
        columns, texts, wider = self.columns[table], self.texts[table], self.wider[table]
        self.changes += 1
        kinds = ("rename", "drop", "add", "default", "widen", "copy" if self.copies else "add")
        kind = self.draw.choice(kinds)
        if kind == "default" and not self.defaults:
            kind = "add"
        old = self.draw.choice(columns)
        # A name that was another column's before, at times.
        new = self.draw.choice([n for n in ("x", "y", f"z{self.changes}") if n not in columns])
        if kind == "rename":
            columns[columns.index(old)] = new
            if old in texts:
                texts.remove(old)
                texts.add(new)
            if old in wider:
                wider[new] = wider.pop(old)
            if table == "docs" and old == self.key:
                self.key = new
            return f"ALTER TABLE {table} RENAME {old} TO {new}"
        if kind == "drop" and len(columns) > 2 and not (table == "docs" and old == self.key):
            columns.remove(old)
            texts.discard(old)
            wider.pop(old, None)
            return f"ALTER TABLE {table} DROP {old}"
        if kind == "widen" and wider:
            column = self.draw.choice(sorted(wider))
            return f"ALTER TABLE {table} ALTER {column} TYPE {wider.pop(column)}"
        if kind == "copy":
            return self.copying(table, new)
        columns.append(new)
        if kind == "default":
            value, type_, later = self.draw.choice(
                (
                    ("'given'", "text", None),
                    ("'short'", "varchar(9)", "text"),
                    ("7", "int", "bigint"),
                    ("0.1", "real", "double precision"),
                    ("1.5", "numeric(6, 2)", "numeric(12, 2)"),
                    ("now()", "timestamptz", None),
                )
            )
            if later:
                wider[new] = later
            if type_ == "text":
                texts.add(new)
            return f"ALTER TABLE {table} ADD {new} {type_} NOT NULL DEFAULT {value}"
        texts.add(new)
        return f"ALTER TABLE {table} ADD {new} text"

    def copying(self, table, new):
        """A change that is followed by a copy only."""
        texts = sorted(self.texts[table])
        if texts and self.draw.random() < 0.5:
            self.causes.add((table, "using"))
            column = self.draw.choice(texts)
            return f"ALTER TABLE {table} ALTER {column} TYPE varchar(50) USING left({column}, 1)"
        self.columns[table].append(new)
        self.causes.add((table, "volatile"))
        return f"ALTER TABLE {table} ADD {new} float8 DEFAULT random()"


def test_14_a_live_read_leaves_the_table_out_until_the_epoch_that_has_the_change(
    recorded, database
):
    recorded.flush()
    database.execute("ALTER TABLE docs RENAME title TO heading", "UPDATE pairs SET a = a + 100")
    recorded.barrier()
    live = read(recorded.spark, recorded.lake, live=True, log=recorded.log.address)
    assert DOCS in live.stale
    assert "columns have changed" in live.stale[DOCS]
    assert PAIRS in live.tables
    recorded.flush()
    live = read(recorded.spark, recorded.lake, live=True, log=recorded.log.address)
    assert "heading" in live["docs"].columns
    database.execute("UPDATE docs SET heading = 'later' WHERE id = 1")
    recorded.barrier()
    live = read(recorded.spark, recorded.lake, live=True, log=recorded.log.address)
    assert_equal(database.dsn, live, counted=False)
