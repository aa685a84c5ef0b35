"""A lake whose tables are in an Iceberg REST catalog, from PostgreSQL to what engines read."""

import copy
import random
import threading
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from spark_consumers import read
from spark_consumers.lake import reader
from spark_consumers.lake.catalog import open_catalog, rest_statements, whole_epochs
from spark_consumers.lake.catalog.open_catalog import recorded
from spark_consumers.lake.catalog.rest_statements import preamble
from spark_consumers.lake.catalog.statements import DUCKDB, PYICEBERG
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.manifest.table_version import LIVE, STALE
from spark_consumers.lake.verify import verify
from spark_consumers.lake.writer import requests
from spark_consumers.spark.lake_catalog import LakeCatalog
from spark_consumers.spark.session import session
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.engines import connected
from tests.support.feed_check import Applied, bag_of, changes_of, rows_of
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import TABLES, Pipeline
from tests.support.pin_requests import Pins
from tests.support.rest_catalog import RestServer
from tests.support.view_check import BY_TITLE, FLAT, JOINED, assert_followed
from tests.support.waiting import wait_for
from walsender_bridge.cli.epochs import cut_tables
from walsender_bridge.errors import (
    FencedError,
    LakeError,
    TusklineError,
    UnavailableError,
    UnsupportedByCatalogError,
)
from walsender_bridge.postgres.table_layout import LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern
from walsender_bridge.runtime import fail_point

NAMESPACE = ("lakes", "one")


@pytest.fixture(scope="module")
def server():
    with RestServer().running() as server:
        yield server


class RestPipeline(Pipeline):
    """A pipeline into a lake in the catalog of this server."""

    server: RestServer

    def lakehouse(self, sources=None, **options):
        rest = LakeCatalog(self.server.uri, namespace=NAMESPACE, allow_http=True)
        return super().lakehouse(sources, **{"rest": rest, **options})


@contextmanager
def running(spark, folder, database, server):
    """A pipeline with its tables copied."""
    database.execute(*TABLES)
    made = RestPipeline(spark, folder, database)
    made.server = server
    with made:
        made.wait_for_tables("docs", "pairs", "bag")
        yield made


@pytest.fixture
def pipeline(spark, tmp_path, database, server):
    server.tables.clear()
    server.files.clear()
    with running(spark, tmp_path, database, server) as made:
        yield made


def catalog_of(server):
    """The catalog as PyIceberg reads it."""
    load_catalog = pytest.importorskip("pyiceberg.catalog").load_catalog
    return load_catalog("lake", type="rest", uri=server.uri)


def no_leases(monkeypatch):
    """Readers of this process keep no epoch."""
    monkeypatch.setattr(reader, "lease_on", lambda _: None)


def of_database(database, statement):
    with database.connect() as connection:
        return sorted(connection.execute(statement).fetchall(), key=repr)


def check(pipeline, database, server):
    """What PostgreSQL has is what `read` returns, and what another engine reads through the catalog by the tables' names."""
    snapshot = pipeline.flush()
    # The names are given, and the epoch is shown, with the next look at the latest.
    pipeline.house.run_once()
    engine = catalog_of(server)
    for table, columns in (("docs", ["id", "title"]), ("pairs", ["a", "b"]), ("bag", ["a", "t"])):
        wanted = of_database(database, f"SELECT {', '.join(columns)} FROM {table}")
        found = sorted(map(tuple, snapshot[table].select(*columns).collect()), key=repr)
        assert found == wanted, table
        there = engine.load_table((*NAMESPACE, STREAM, "public", table))
        read = there.scan(selected_fields=tuple(columns)).to_arrow().to_pylist()
        assert sorted((tuple(r[c] for c in columns) for r in read), key=repr) == wanted, table
    control = engine.load_table((*NAMESPACE, "tuskline_epochs"))
    assert control.current_snapshot().summary["tuskline.epoch"] == str(snapshot.epoch)
    assert control.scan().to_arrow().num_rows == 0
    return snapshot


def by_name_in_spark(pipeline, database):
    """A session that names the lake has its tables in the REST catalog."""
    running = session(lake=pipeline.lake, catalog="by_name")
    assert running.conf.get("spark.sql.catalog.by_name.type") == "rest"
    place = ".".join(("by_name", *NAMESPACE, STREAM, "public"))
    found = running.sql(f"SELECT id, title, n FROM {place}.docs").collect()
    wanted = of_database(database, "SELECT id, title, n FROM docs")
    assert sorted(map(tuple, found), key=repr) == wanted
    assert running.sql(f"SELECT * FROM by_name.{'.'.join(NAMESPACE)}.tuskline_epochs").count() == 0


def by_printed_statements(pipeline, database, snapshot):
    """What `epochs show --sql` prints for PyIceberg and DuckDB reads the cut."""
    chain = open_chain(pipeline.lake)
    tables, left_out = cut_tables(snapshot.manifest, snapshot.manifest)
    assert left_out == {}
    wanted = of_database(database, "SELECT id, title FROM docs")
    place = recorded(chain)
    assert place is not None
    printed: dict[str, Any] = {}
    made = rest_statements.statements(PYICEBERG, place, tables).values()
    exec("\n".join([preamble(PYICEBERG, place, guarded=False), *made]), printed)  # noqa: S102  # what is printed is run
    rows = printed["tables"][f"{STREAM}.public.docs"].to_arrow().to_pylist()
    assert sorted(((r["id"], r["title"]) for r in rows), key=repr) == wanted
    with closing(connected()) as duck:
        for line in preamble(DUCKDB, place, guarded=False).splitlines():
            if not line.startswith("LOAD"):
                duck.execute(line)
        for statement in rest_statements.statements(DUCKDB, place, tables).values():
            duck.execute(statement)
        found = duck.execute("SELECT id, title FROM public_docs").fetchall()
    assert sorted(found, key=repr) == wanted


@pytest.mark.both_formats
def test_28_epochs_are_the_databases_rows_for_read_and_for_engines(pipeline, database, server):
    check(pipeline, database, server)
    database.execute(
        "UPDATE docs SET title = 'other' WHERE id = 3",
        "UPDATE docs SET id = 30 WHERE id = 4",
        "DELETE FROM docs WHERE id = 5",
        "DELETE FROM bag WHERE a IS NULL",
        "INSERT INTO docs SELECT g, 'n', 'b', g, 1 FROM generate_series(100, 104) g",
    )
    first = check(pipeline, database, server)
    by_name_in_spark(pipeline, database)
    by_printed_statements(pipeline, database, first)
    database.execute("TRUNCATE bag", "ALTER TABLE docs ADD extra text DEFAULT 'x'")
    database.execute("INSERT INTO docs (id, extra) VALUES (200, 'y')")
    snapshot = check(pipeline, database, server)
    assert {r.extra for r in snapshot["docs"].filter("id > 199").collect()} == {"y"}
    # An earlier epoch is as it was.
    assert read(pipeline.spark, pipeline.lake, epoch=first.epoch)["bag"].count() == 4


def changed(pipeline, database, house=None):
    """One more epoch, in which every table has changed."""
    database.execute(
        "UPDATE docs SET n = n + 1",
        "UPDATE pairs SET at = now() + a * interval '1 day'",
        "INSERT INTO bag SELECT * FROM bag WHERE ctid = (SELECT min(ctid) FROM bag)",
    )
    return pipeline.flush(house)


def test_a_feed_is_shown_with_its_table(pipeline, database, server):
    """It leads from one epoch to the next, gets its table's columns, and is one of the tables of the catalog's commit."""
    pipeline.house.close()
    rule = LayoutRule(Pattern.parse("public.docs"), TableLayout(), feed="{table}_changes")
    pipeline.house = pipeline.lakehouse(layouts=[rule])
    pipeline.wait_for_tables("docs_changes")
    before = pipeline.flush()
    database.execute(
        "UPDATE docs SET title = 'again' WHERE id < 4",
        "ALTER TABLE docs ADD extra int",
        "INSERT INTO docs (id, extra) VALUES (50, 5)",
        "DELETE FROM docs WHERE id = 1",
    )
    after = pipeline.flush()
    rows = [{**row, "extra": None} for row in rows_of(before["docs"])]
    led = Applied(rows, ("id",)).apply(changes_of(after, "docs_changes", before.epoch))
    assert bag_of(led.rows) == bag_of(rows_of(after["docs"]))
    check(pipeline, database, server)
    feed = catalog_of(server).load_table((*NAMESPACE, STREAM, "public", "docs_changes"))
    shown = feed.scan().to_arrow().to_pylist()
    assert sorted(row["_op"] for row in shown) == sorted(
        row._op for row in after["docs_changes"].collect()
    )


def test_27_views_are_shown_with_their_tables(pipeline, database, server, monkeypatch):
    """They are kept as in a folder, and other engines find them beside the tables, at the same epoch."""
    views = (FLAT, BY_TITLE, JOINED)
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(views=views)
    assert_followed(pipeline, database, monkeypatch, views)
    check(pipeline, database, server)
    shown = catalog_of(server).load_table((*NAMESPACE, STREAM, *FLAT.name.split(".")))
    found = shown.scan().to_arrow().to_pylist()
    wanted = of_database(database, FLAT.sql)
    assert sorted(map(tuple, map(dict.values, found)), key=repr) == wanted


def test_a_writer_that_is_taken_over_while_it_shows_an_epoch_changes_no_table(
    pipeline, database, server, monkeypatch
):
    old = pipeline.house
    found: list[dict[tuple[str, ...], dict[str, object]]] = []

    def hit(place):
        if place == "before-shown" and pipeline.made == [old]:
            # Everything is loaded, and the request is about to be sent.
            pipeline.lakehouse().run_once()
            found.append(copy.deepcopy(server.tables))

    monkeypatch.setattr(fail_point, "hit", hit)
    with pytest.raises(FencedError, match="term 1 may no longer write this table"):
        changed(pipeline, database, old)
    assert found == [server.tables]
    monkeypatch.undo()
    with pytest.raises(FencedError):
        changed(pipeline, database, old)
    assert found == [server.tables]
    pipeline.house = pipeline.made[-1]
    check(pipeline, database, server)
    # What one has published and not shown when it dies is shown by the next one, in all tables at once.
    with monkeypatch.context() as dying:
        dying.setattr(fail_point, "hit", dies_before_it_shows)
        with pytest.raises(InterruptedError):
            changed(pipeline, database)
    seen = []
    server.seen = lambda *_: seen.append(versions_shown(server))
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse()
    pipeline.house.run_once()
    server.seen = lambda *_: None
    seen.append(versions_shown(server))
    assert [len(each) for each in seen if len(each) > 1] == []
    assert seen[0] != seen[-1]
    # Nor is anything left of what it had made for the commit that never came.
    server.assert_no_stray_manifest((*NAMESPACE, "tuskline_epochs"))
    # Nor does one with other settings take it over.
    pipeline.house.close()
    with pytest.raises(LakeError, match="the tables of this lake are in the catalog at"):
        pipeline.lakehouse(rest=None).run_once()
    other = LakeCatalog(server.uri, namespace=("others",), allow_http=True)
    with pytest.raises(LakeError, match=r"are in the namespace 'lakes\.one'"):
        pipeline.lakehouse(rest=other).run_once()


def dies_before_it_shows(place):
    """A fail point's."""
    if place == "before-shown":
        raise InterruptedError


def versions_shown(server):
    """Up to which versions of the log the tables are for plain readers."""
    found = set()
    with server.lock:
        for name, metadata in server.tables.items():
            if name[:-1] == (*NAMESPACE, STREAM, "public"):
                by_id = {s["snapshot-id"]: s["summary"] for s in metadata["snapshots"]}
                main = metadata["refs"]["main"]["snapshot-id"]
                found.add(by_id[main]["tuskline.version"])
    return found


FAULTS = ("500 after", "503 after", "dropped after", "twice", "500 before")


def test_epochs_are_whole_and_made_once_whatever_becomes_of_answers(
    pipeline, database, server, spark, monkeypatch
):
    no_leases(monkeypatch)
    for fault in FAULTS:
        # The tables' commits, and the one that shows them.
        server.faults.extend([fault, "", fault, fault, "", fault])
        changed(pipeline, database)
        server.faults.clear()
        check(pipeline, database, server)
    before = check(pipeline, database, server)
    database.execute("UPDATE docs SET title = 'while it is down'")
    server.down = True
    try:
        with pytest.raises(UnavailableError, match="the catalog does not answer"):
            pipeline.flush()
        with pytest.raises(UnavailableError, match="the catalog does not answer"):
            read(pipeline.spark, pipeline.lake)
    finally:
        server.down = False
    assert check(pipeline, database, server).epoch > before.epoch
    assert_equal(database.dsn, read(spark, pipeline.lake))
    for table in ("docs", "pairs", "bag"):
        name = (*NAMESPACE, STREAM, "public", table)
        written = [s["summary"]["tuskline.version"] for s in server.tables[name]["snapshots"]]
        assert len(written) == len(set(written))
    pins = Pins(pipeline)
    pins.expire()
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse()
    pipeline.house.run_once()
    for _ in range(8):
        pins.expire()
    assert_no_orphans(spark, pipeline.lake)
    server.assert_no_stray_manifest()
    assert verify(open_chain(pipeline.lake), lambda *_: None).errors == []


def test_an_operation_that_the_catalog_lacks_suspends_no_table(pipeline, database, server):
    """Neither one that follows, nor one that is to be copied: the catalog is named, and all goes on when it has it."""
    for status in ("501 before", "406 before"):
        server.faults.append(status)
        with pytest.raises(UnsupportedByCatalogError, match="the catalog does not support"):
            changed(pipeline, database)
        server.faults.clear()
        assert {table.state for table in pipeline.head().tables.values()} == {LIVE}
        check(pipeline, database, server)
    said: list[TusklineError | None] = []
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(failing=said.append)
    pipeline.house.run_once()
    server.creates = False
    database.execute("CREATE TABLE late (id int PRIMARY KEY)", "INSERT INTO late VALUES (1)")
    database.execute(f"ALTER PUBLICATION {PUBLICATION} ADD TABLE late")
    stop = threading.Event()
    running = threading.Thread(target=pipeline.house.run, args=(stop,))
    running.start()
    try:
        wait_for(
            lambda: any(e and "does not support" in e.what for e in said),
            60,
            "the catalog is named",
        )
        assert f"{STREAM}.public.late" not in pipeline.head().not_copied
        server.creates = True
        wait_for(lambda: f"{STREAM}.public.late" in pipeline.head().copies, 60, "the copy")
    finally:
        server.creates = True
        stop.set()
        running.join(60)
    assert not running.is_alive()
    pipeline.house = pipeline.lakehouse()
    pipeline.wait_for_tables("late")
    check(pipeline, database, server)


@pytest.mark.long
def test_a_table_that_the_catalog_refuses_is_suspended_and_the_others_go_on(
    pipeline, database, server
):
    refuses = ["/tables/docs"]
    answer = server.answer

    def answered(method, path, body, query=None):
        if method == "POST" and path.endswith(tuple(refuses)):
            return 400, {"error": {"message": "no such type", "type": "BadRequestException"}}
        return answer(method, path, body, query)

    check(pipeline, database, server)
    server.answer = answered
    try:
        changed(pipeline, database)
        docs = f"{STREAM}.public.docs"
        head = pipeline.head()
        assert {n: t.state for n, t in head.tables.items() if t.state != LIVE} == {docs: STALE}
        assert "no such type" in head.tables[docs].reason
        refuses[:] = ["/nothing"]
        request = requests.ask(open_chain(pipeline.lake), requests.RESUME, [docs])
        wait_for(
            lambda: (
                pipeline.house.run_once(force=True),
                requests.finished(pipeline.head(), request),
            )[1],
            60,
            "the request",
        )
        check(pipeline, database, server)
    finally:
        del server.answer


def mains(server):
    """The snapshot that plain readers see of each table, by its name."""
    with server.lock:
        return {
            name[-1]: metadata["refs"]["main"]["snapshot-id"]
            for name, metadata in server.tables.items()
            if name[:-1] == (*NAMESPACE, STREAM, "public")
        }


def rows_of_main(server, table):
    """The ids that another engine reads."""
    found = catalog_of(server).load_table((*NAMESPACE, STREAM, "public", table)).scan()
    return sorted(found.to_arrow()["id"].to_pylist())


def test_commits_of_other_programs_are_neither_lost_nor_seen_beside_half_an_epoch(
    pipeline, database, server, monkeypatch
):
    by_others = session(lake=pipeline.lake, catalog="theirs")
    docs = ".".join(("theirs", *NAMESPACE, STREAM, "public", "docs"))
    check(pipeline, database, server)
    # What changes no row of theirs or ours stays, whoever has made it.
    by_others.sql(f"ALTER TABLE {docs} SET TBLPROPERTIES ('reviewed' = 'by others')")
    by_others.sql(f"ALTER TABLE {docs} CREATE TAG theirs")
    changed(pipeline, database)
    before = check(pipeline, database, server)
    metadata = server.tables[(*NAMESPACE, STREAM, "public", "docs")]
    assert metadata["properties"]["reviewed"] == "by others"
    assert "theirs" in metadata["refs"]

    def insert():
        by_others.sql(f"REFRESH TABLE {docs}")
        by_others.sql(f"INSERT INTO {docs} VALUES (777, 'theirs', 'b', 1, 1)")

    def is_refused(shown):
        """Nothing of the next epoch is in any table, theirs is; `read` has it, and the driver names the table."""
        snapshot = pipeline.flush()
        assert_equal(database.dsn, snapshot)
        for _ in range(3):
            pipeline.house.run_once()
        assert mains(server) == shown()
        assert 777 in rows_of_main(server, "docs")
        trouble = pipeline.house._trouble()
        assert trouble is not None
        assert trouble.where == f"{STREAM}.public.docs"
        assert "another program has committed" in trouble.what

    # Before the epoch is written; what they did is undone as the hint says.
    insert()
    theirs = mains(server)
    database.execute("UPDATE docs SET n = n + 1", "UPDATE pairs SET at = now()")
    is_refused(lambda: theirs)
    ours = before.manifest.tables[f"{STREAM}.public.docs"].snapshot_id
    by_others.sql(
        f"CALL theirs.system.rollback_to_snapshot('{docs.removeprefix('theirs.')}', {ours})"
    )
    monkeypatch.setattr(whole_epochs, "_AFTER_FAILURE", 0.0)
    pipeline.house._whole._show_at = 0.0
    check(pipeline, database, server)
    assert pipeline.house._trouble() is None
    # Between the moment at which the epoch is prepared and its commit.
    once = [insert]

    def hit(place):
        if place == "before-shown" and once:
            once.pop()()
            found.append(mains(server))

    found: list[dict[str, int]] = []
    with monkeypatch.context() as patched:
        patched.setattr(fail_point, "hit", hit)
        database.execute("UPDATE docs SET n = n + 1", "UPDATE pairs SET at = now()")
        is_refused(lambda: found[0])
    # The table is copied again instead.
    path = pipeline.head().tables[f"{STREAM}.public.docs"].path
    requests.ask(open_chain(pipeline.lake), requests.RESYNC, [f"{STREAM}.public.docs"])

    def copied():
        pipeline.house.run_once(force=True)
        return pipeline.head().tables[f"{STREAM}.public.docs"].path != path

    wait_for(copied, 120, "another copy of docs")
    check(pipeline, database, server)
    assert pipeline.house._trouble() is None
    # A column of theirs is NULL in rows of ours.
    by_others.sql(f"REFRESH TABLE {docs}")
    by_others.sql(f"ALTER TABLE {docs} ADD COLUMN theirs string")
    database.execute("UPDATE docs SET n = n + 1", "ALTER TABLE docs ADD ours int")
    database.execute("UPDATE docs SET ours = 7 WHERE id = 3")
    snapshot = check(pipeline, database, server)
    rows = {(r.id, r.ours, r.theirs) for r in snapshot["docs"].filter("id < 4").collect()}
    assert rows == {(1, None, None), (2, None, None), (3, 7, None)}


#: Fifteen times as fast as a catalog that takes 5 to 20 s for an answer, of 30 that it is given.
ALLOWED, FASTEST, SLOWEST = 2.0, 5 / 15, 20 / 15


def reached(pipeline, version):
    return pipeline.head().epoch >= version


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_catalog_that_is_slow_makes_epochs_slow_and_nothing_twice(
    pipeline, database, server, spark, monkeypatch, seed
):
    no_leases(monkeypatch)
    made = open_catalog.options
    monkeypatch.setattr(
        open_catalog, "options", lambda place: replace(made(place), answer=ALLOWED, slow=FASTEST)
    )
    drawn = random.Random(seed)

    def delay(method):
        # Some changes are made, and their answers come when nobody waits for them any more.
        is_late = method == "POST" and drawn.random() < 0.2
        return ALLOWED + 0.5 if is_late else drawn.uniform(FASTEST, SLOWEST)

    pipeline.house.close()
    said: list[TusklineError | None] = []
    pipeline.house = pipeline.lakehouse(failing=said.append)
    monkeypatch.setattr(server, "delay", delay)
    stop = threading.Event()
    running = threading.Thread(target=pipeline.house.run, args=(stop,))
    running.start()
    try:
        for number in range(3):
            database.execute(
                "BEGIN; UPDATE docs SET n = n + 1; UPDATE pairs SET at = now();"
                f"INSERT INTO bag VALUES ({number}, 0, 'slow', NULL); COMMIT"
            )
            version, before = pipeline.barrier(), len(server.requests)
            # Whatever is waited for is waited for so long at most: each request, and what is between them.
            wait_for(partial(reached, pipeline, version), 240, "an epoch")
            asked = server.requests[before:]
            assert len(asked) < 60, asked
            began, before = time.monotonic(), len(server.requests)
            snapshot = read(spark, pipeline.lake)
            assert snapshot.epoch >= version
            assert snapshot["bag"].where("t = 'slow'").count() == number + 1
            asked = server.requests[before:]
            assert time.monotonic() - began < len(asked) * ALLOWED + 60
    finally:
        stop.set()
        running.join(240)
        server.delay = lambda _: 0.0
    assert not running.is_alive()
    # The driver's state says what it waits for, and that no round has failed for it.
    told = [error.what for error in said if error is not None]
    assert any(what.startswith("the catalog answers slowly: ") for what in told), told
    pipeline.house = pipeline.lakehouse()
    check(pipeline, database, server)
    for table in ("docs", "pairs", "bag"):
        metadata = server.tables[(*NAMESPACE, STREAM, "public", table)]
        written = [s["summary"]["tuskline.version"] for s in metadata["snapshots"]]
        assert len(written) == len(set(written))
    assert verify(open_chain(pipeline.lake), lambda *_: None).errors == []


@pytest.mark.long
def test_a_pin_is_a_tag_in_the_catalog_until_it_is_released(
    pipeline, database, server, monkeypatch
):
    no_leases(monkeypatch)
    pins = Pins(pipeline)
    pinned = changed(pipeline, database)
    wanted = sorted(r.n for r in pinned["docs"].select("n").collect())
    assert pins.pin("close", pinned.epoch).startswith("pins epoch")
    changed(pipeline, database)
    changed(pipeline, database)
    pins.expire()
    found = read(pipeline.spark, pipeline.lake, pin="close")
    assert sorted(r.n for r in found["docs"].select("n").collect()) == wanted
    docs = catalog_of(server).load_table((*NAMESPACE, STREAM, "public", "docs"))
    there = docs.scan().use_ref("tuskline_pin_close").to_arrow().to_pylist()
    assert sorted(row["n"] for row in there) == wanted
    pins.unpin("close")
    pins.expire()
    docs = catalog_of(server).load_table((*NAMESPACE, STREAM, "public", "docs"))
    assert "tuskline_pin_close" not in docs.metadata.refs
    assert len(docs.metadata.snapshots) == 1


@pytest.mark.long
def test_a_table_that_is_copied_again_keeps_its_name_and_leaves_nothing(
    pipeline, database, server, monkeypatch
):
    no_leases(monkeypatch)
    first = pipeline.head().tables[f"{STREAM}.public.docs"].path
    database.execute("ALTER TABLE docs ALTER title TYPE varchar(99)")
    database.execute("INSERT INTO docs (id, title) VALUES (77, 'v')")
    pipeline.wait_for_tables("docs")

    def copied():
        pipeline.house.run_once(force=True)
        table = pipeline.head().tables[f"{STREAM}.public.docs"]
        return table.path != first and table.state == "live"

    wait_for(copied, 120, "another copy of docs")
    check(pipeline, database, server)
    pins = Pins(pipeline)
    for _ in range(3):
        pins.expire()
    space = (*NAMESPACE, STREAM, "public")
    assert sorted(n[-1] for n in server.tables if n[:-1] == space) == ["bag", "docs", "pairs"]
    assert not (pipeline.lake / first).exists()
    check(pipeline, database, server)
    # One that has left is not taken over, and keeps no other from being shown.
    database.execute(f"ALTER PUBLICATION {PUBLICATION} DROP TABLE pairs")
    database.execute("UPDATE docs SET title = 'later'")

    def left():
        pipeline.house.run_once(force=True)
        return pipeline.head().tables[f"{STREAM}.public.pairs"].state == "left"

    wait_for(left, 60, "pairs has left")
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse()
    check(pipeline, database, server)


@pytest.mark.long
def test_where_there_is_no_version_3_tables_are_copied_on_write(spark, tmp_path, database):
    """And commits are of one table at a time."""
    with (
        RestServer(v3=False, multi_table=False).running() as server,
        running(spark, tmp_path, database, server) as pipeline,
    ):
        for _ in range(2):
            database.execute("UPDATE docs SET title = title || '2'", "DELETE FROM bag WHERE a = 1")
            check(pipeline, database, server)
        for metadata in server.tables.values():
            assert metadata["format-version"] == 2
            for snapshot in metadata["snapshots"]:
                assert snapshot["summary"].get("total-delete-files", "0") == "0"
