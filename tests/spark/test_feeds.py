"""Change feeds: applied to the table of an epoch, a feed leads to the table of each later one."""

import json
import threading

import pytest

from spark_consumers import Source, read
from spark_consumers.lake.epoch import plan
from spark_consumers.lake.flush import flush
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.manifest.table_version import STALE
from spark_consumers.lake.writer import pipeline as rounds
from spark_consumers.lake.writer.requests import ask
from tests.support import bank_load
from tests.support.capture_stack import STREAM
from tests.support.feed_check import Applied, bag_of, changes_of, rows_of
from tests.support.lake_check import assert_no_orphans
from tests.support.lake_pipeline import TABLES, Pipeline
from tests.support.stack import Stack
from tests.support.waiting import wait_for
from walsender_bridge.errors import LakeError
from walsender_bridge.observability.table_problems import problems
from walsender_bridge.postgres.table_layout import SOFT_DELETE, LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern

KEYS = {"docs": ("id",), "pairs": ("b", "a"), "bag": ()}
FEED = "{table}_changes"
CHANGES = (
    (
        "INSERT INTO docs SELECT g, 't', repeat('n', 4000), g, 1 FROM generate_series(20, 24) g",
        # An unchanged TOAST value, of a row of this transaction, of the table, and under another key.
        "UPDATE docs SET title = 'again' WHERE id IN (1, 20)",
        "UPDATE docs SET id = id + 100 WHERE id IN (2, 21)",
        "UPDATE docs SET id = id + 100, body = 'short' WHERE id = 3",
        "DELETE FROM docs WHERE id IN (4, 22)",
        "INSERT INTO docs VALUES (4, 'new', NULL, NULL, NULL)",
    ),
    (
        "UPDATE pairs SET at = now(), tags = '{3}' WHERE a = 1",
        "UPDATE pairs SET a = a + 10",
        "INSERT INTO pairs VALUES (1, 'x', NULL, '{}')",
        "DELETE FROM pairs WHERE a = 12",
    ),
    (
        "INSERT INTO bag VALUES (1, 0, 'three', '{a,NULL}'), (7, 7, repeat('seven', 2000), NULL)",
        "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = 1)",
        "UPDATE bag SET f = f + 1 WHERE a = 1",
        "UPDATE bag SET a = 8 WHERE a = 7",
    ),
    ("TRUNCATE docs, bag", "INSERT INTO docs VALUES (1, 'after', 'x', 1, 1)"),
    ("UPDATE docs SET n = n + 1", "INSERT INTO bag VALUES (1, 1, 'one', NULL)"),
)


def rule(pattern="*", feed=FEED, layout=None, **more):
    return LayoutRule(
        Pattern.parse(f"public.{pattern}"), layout or TableLayout(), feed=feed, **more
    )


#: A section for the names of feeds is theirs; the one that gives them to tables is not, though it matches them.
RULES = [
    rule("*_changes", "", TableLayout.parse(["day(_commit_time)"])),
    rule(layout=TableLayout.parse(options={"note": "of the tables"})),
]


@pytest.fixture
def fed(spark, tmp_path, database):
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database) as pipeline:
        pipeline.house = pipeline.lakehouse(layouts=RULES)
        pipeline.wait_for_tables(*KEYS, *(f"{name}_changes" for name in KEYS))
        yield pipeline


def in_one_transaction(database, statements):
    with database.connect() as connection:
        connection.autocommit = False
        for statement in statements:
            connection.execute(statement)
        connection.commit()


def assert_led(before, after):
    """At the later epoch each table is what its feed makes of the earlier one."""
    for name, key in KEYS.items():
        changes = changes_of(after, f"{name}_changes", before.epoch)
        led = Applied(rows_of(before[name]), key).apply(changes)
        assert bag_of(led.rows) == bag_of(rows_of(after[name])), name
    return after


@pytest.mark.parametrize("ranges", [False, True], ids=["at-once", "in-ranges"])
def test_a_feed_leads_from_each_epoch_to_the_next(fed, database, monkeypatch, ranges):
    if ranges:
        monkeypatch.setattr(plan, "RANGE_BYTES", 1)
    seen = [fed.flush()]
    for name in KEYS:
        (begin,) = changes_of(seen[0], f"{name}_changes")
        assert (begin["_op"], begin["_version"] <= seen[0].epoch) == ("begin", True)
    for statements in CHANGES:
        in_one_transaction(database, statements)
        seen.append(assert_led(seen[-1], fed.flush()))
    # Several epochs at a time, and many transactions in one.
    assert_led(seen[0], seen[3])
    for statements in CHANGES:
        in_one_transaction(database, statements[:1])
    last = assert_led(seen[-1], fed.flush())
    changes = changes_of(last, "docs_changes")
    assert {change["_op"] for change in changes} == {
        *("begin", "insert", "update_before", "update", "delete", "truncate"),
    }
    lsns = [change["_commit_lsn"] for change in changes]
    assert lsns == sorted(lsns)
    # The rows of a transaction are of one commit, and nothing else has its number.
    of_first = [c for c in changes if c["_op"] == "insert" and c["id"] in {20, 21, 22, 23, 24}][:5]
    assert len({(c["_xid"], c["_commit_lsn"], c["_commit_time"]) for c in of_first}) == 1
    (unchanged,) = [c for c in changes if c["_op"] == "update" and c["id"] == 102]
    assert (unchanged["_unchanged"], unchanged["body"]) == (["body"], None)
    # What an epoch has not written is not swept for remains.
    swept = set()
    monkeypatch.setattr(rounds, "remove_orphans", lambda _, written, *__: swept.update(written))
    database.execute("INSERT INTO docs VALUES (1, 'after', 'x', 1, 1)")
    fed.flush()
    assert {name.rpartition(".")[2] for name in swept} == {"docs", "docs_changes"}


def test_a_feed_of_a_table_that_keeps_deleted_rows_leads_to_the_living_ones(
    spark, tmp_path, database
):
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database, ("public.docs",)) as pipeline:
        pipeline.house = pipeline.lakehouse(layouts=[rule(mode=SOFT_DELETE)])
        pipeline.wait_for_tables("docs", "docs_changes")
        before = pipeline.flush()
        in_one_transaction(database, CHANGES[0])
        after = pipeline.flush()
        marks = ("_deleted_at", "_deleted_lsn")
        was, is_now = (s["docs"].where("_deleted_at IS NULL").drop(*marks) for s in (before, after))
        led = Applied(rows_of(was), ("id",)).apply(changes_of(after, "docs_changes", before.epoch))
        assert bag_of(led.rows) == bag_of(rows_of(is_now))
        assert after["docs"].count() > is_now.count()


def states(pipeline):
    return {name.rpartition(".")[2]: feed for name, feed in pipeline.head().feeds.items()}


def resynced(pipeline, name):
    """Have a table copied again, without an epoch."""
    request(pipeline.lake, "resync", name)
    wait_for_copy(pipeline, name)


def wait_for_copy(pipeline, name):
    def copied():
        pipeline.house.run_once()
        return f"{STREAM}.public.{name}" in pipeline.head().copies

    wait_for(copied, 60, "another copy")


def request(lake, kind, name):
    ask(open_chain(lake), kind, [f"{STREAM}.public.{name}"])


def test_copies_pauses_and_columns(fed, database):
    """A feed goes on through a pause, another copy and other columns; where it cannot say all, it says `begin`, or is a new table."""
    first = fed.flush()
    before = states(fed)
    # Nothing is lost by a pause, and the feed is of its table's epoch meanwhile.
    request(fed.lake, "pause", "docs")
    fed.house.run_once(force=True)
    in_one_transaction(database, CHANGES[0])
    paused = fed.flush()
    assert {name.rpartition(".")[2] for name in paused.stale} == {"docs", "docs_changes"}
    assert states(fed)["docs_changes"].table.rows == before["docs_changes"].table.rows
    request(fed.lake, "resume", "docs")
    fed.house.run_once(force=True)
    second = assert_led(first, fed.flush())
    # A copy that begins before an epoch, and is shown by a later one: what lies between is in the feed once.
    with database.connect() as other:
        other.autocommit = False
        other.execute("SELECT txid_current()")
        request(fed.lake, "resync", "pairs")
        for _ in range(2):
            fed.house.run_once()
        in_one_transaction(database, CHANGES[1])
        between = assert_led(second, fed.flush())
        assert not fed.head().copies
        other.rollback()
    wait_for_copy(fed, "pairs")
    shown = fed.flush()
    assert [c["_op"] for c in changes_of(shown, "pairs_changes", between.epoch)] == ["begin"]
    changes = changes_of(shown, "pairs_changes", second.epoch)
    assert bag_of(changes[:-1]) == bag_of(changes_of(between, "pairs_changes", second.epoch))
    second = shown
    # Another copy: its rows need not be what the changes lead to, and the feed says so behind them. It has those that the
    # copy has, too, and each once.
    in_one_transaction(database, CHANGES[2])
    resynced(fed, "bag")
    in_one_transaction(database, CHANGES[2][:2])
    third = fed.flush()
    changes = changes_of(third, "bag_changes", second.epoch)
    assert [c["_op"] for c in changes].count("begin") == 1
    assert changes[-1]["_op"] == "begin"
    led = Applied(rows_of(second["bag"])).apply(changes[:-1])
    assert bag_of(led.rows) == bag_of(rows_of(third["bag"]))
    assert states(fed)["bag_changes"].table.path == before["bag_changes"].table.path
    # Columns that come, go and get other names.
    database.execute("ALTER TABLE docs ADD extra text", "UPDATE docs SET extra = 'x' WHERE id = 4")
    fourth = fed.flush()
    changes = changes_of(fourth, "docs_changes")
    assert [c["extra"] for c in changes if c["extra"] is not None] == ["x"]
    assert states(fed)["docs_changes"].table.path == before["docs_changes"].table.path
    in_one_transaction(database, CHANGES[4])
    assert_led(fourth, fed.flush())
    # Another type: another table, from there on.
    database.execute("ALTER TABLE bag ALTER a TYPE text", "INSERT INTO bag VALUES ('eight')")

    def retyped():
        fed.house.run_once(force=True)
        return states(fed)["bag_changes"].table.path != before["bag_changes"].table.path

    wait_for(retyped, 60, "a feed with the new type")
    fifth = fed.flush()
    (begin,) = changes_of(fifth, "bag_changes")
    assert begin["_op"] == "begin"
    in_one_transaction(database, ("DELETE FROM bag WHERE a = 'eight'", *CHANGES[4][:1]))
    assert_led(fifth, fed.flush())


def test_a_stream_over_a_feed_has_each_change_once(fed, database, spark, tmp_path):
    seen = []

    def take(batch, _):
        seen.extend(rows_of(batch))

    def stream():
        path = fed.lake / states(fed)["docs_changes"].table.path
        query = (
            spark.readStream.format("iceberg")
            .load(str(path))
            .writeStream.foreachBatch(take)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(60)
        assert query.exception() is None

    for statements in CHANGES:
        in_one_transaction(database, statements)
        snapshot = fed.flush()
        stream()
        assert bag_of(seen) == bag_of(changes_of(snapshot, "docs_changes"))
    assert len(seen) > 10


def test_a_live_read_leaves_feeds_out_by_name(fed, database):
    fed.flush()

    def level():
        # The row that the flush itself wrote may come behind its epoch.
        fed.house.run_once(force=True)
        epoch = read(fed.spark, fed.lake)
        live = read(fed.spark, fed.lake, live=True, log=fed.log.address)
        return (epoch, live) if live.tables == epoch.tables else None

    # The epoch has all changes of the log: feeds are as there.
    epoch, live = wait_for(level, 60, "an epoch with all changes")
    assert live["docs_changes"].count() == epoch["docs_changes"].count()
    database.execute("INSERT INTO docs (id) VALUES (77)")
    fed.barrier()
    live = read(fed.spark, fed.lake, live=True, log=fed.log.address)
    assert {name.rpartition(".")[2] for name in live.tables} == set(KEYS)
    with pytest.raises(LakeError, match="a live read has no feeds"):
        live["docs_changes"]
    live = read(fed.spark, fed.lake, live=True, log=fed.log.address, allow_stale=True)
    assert live["docs_changes"].count() == epoch["docs_changes"].count()


def test_a_feed_that_its_table_cannot_have_stops_nothing_else(spark, tmp_path, database):
    database.execute(
        *TABLES,
        "CREATE TABLE own (id int PRIMARY KEY, _op text)",
        "CREATE TABLE bag_changes (id int PRIMARY KEY)",
    )
    tables = ("public.docs", "public.bag", "public.own", "public.bag_changes")
    with Pipeline(spark, tmp_path, database, tables) as pipeline:
        pipeline.house = pipeline.lakehouse(layouts=[rule("docs"), rule("bag"), rule("own")])
        pipeline.wait_for_tables("docs", "bag", "own", "bag_changes", "docs_changes")
        feeds = states(pipeline)
        assert "a table or view of the lake has its name" in feeds["bag_changes"].reason
        assert "its table has a column '_op'" in feeds["own_changes"].reason
        assert pipeline.flush()["bag_changes"].columns == ["id"]
        said = {(p.kind, p.table.rpartition(".")[2]) for p in problems(pipeline.head())}
        assert said == {("feed", "own_changes"), ("feed", "bag_changes")}


def test_damage_of_a_feed_stops_only_the_feed(fed, database):
    """The table goes on; another copy of it begins the feed anew."""
    fed.flush()
    feed = states(fed)["docs_changes"].table
    for file in (fed.lake / feed.path / "metadata").glob("*.metadata.json"):
        file.write_bytes(b"{}")
    fed.house.close()
    fed.house = fed.lakehouse(layouts=RULES)
    database.execute("INSERT INTO docs (id) VALUES (77)")
    snapshot = fed.flush()
    assert {row["id"] for row in rows_of(snapshot["docs"])} == {*range(1, 10), 77}
    stopped = states(fed)["docs_changes"]
    assert stopped.table.state == STALE
    assert "docs_changes" not in {name.rpartition(".")[2] for name in snapshot.tables}
    resynced(fed, "docs")
    again = fed.flush()
    assert states(fed)["docs_changes"].table.path != feed.path
    (begin,) = changes_of(again, "docs_changes")
    assert begin["_op"] == "begin"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_feeds_survive_kills_of_the_driver(tmp_path, database, spark, seed):
    """Under load, with the driver killed around every write: from the first epoch the feeds lead to each later one."""
    database.execute(*bank_load.TABLES)
    keys = {"accounts": ("id",), "moves": ("id",), "audit": ()}
    lake = '[[lake.tables]]\npattern = "public.*"\nfeed = "{table}_log"\n'
    tables = tuple(f"public.{name}" for name in keys)
    stop = threading.Event()
    with Stack(
        tmp_path, {"shop": database.dsn}, epoch_interval=0.5, tables=tables, lake=lake
    ) as stack:
        stack.start("log-server", "bridge", "lake")

        def head():
            return open_chain(stack.lake).head()

        wait_for(lambda: head() is not None and len(head().readable) == 6, 180, "tables and feeds")
        first = head().epoch
        load = threading.Thread(target=bank_load.transfer, args=(database.dsn, stop, seed, 0.05))
        load.start()
        try:
            stack.kill("lake")
            for place in (
                "staged",
                "table-written",
                "feeds-written",
                "before-manifest",
                "after-manifest",
            ):
                before = head()
                stack.start("lake", env={"TUSKLINE_FAIL_POINT": place})
                assert stack.wait("lake", 240) == -9
                assert (head().epoch > before.epoch) == (place == "after-manifest")
            stack.start("lake")
            link = head().link + 3
            wait_for(lambda: head().link >= link, 240, "epochs go on")
        finally:
            stop.set()
            load.join()
        source = Source("shop", database.dsn, "tuskline_shop")
        flush(stack.lake, stack.log_address, [source], timeout=240)
        listed = json.loads(stack.cli("table", "list", "--json").stdout)["tables"]
        assert stack.stop("lake") == 0
        assert {r["table"]: r["feed_of"] for r in listed if r["feed_of"]} == {
            f"shop.public.{name}_log": f"shop.public.{name}" for name in keys
        }
        before = read(spark, stack.lake, epoch=first)
        epochs = sorted({m.epoch for m in open_chain(stack.lake).links() if m.epoch > first})
        assert len(epochs) >= 4
        for epoch in epochs:
            after = read(spark, stack.lake, epoch=epoch)
            for name, key in keys.items():
                changes = changes_of(after, f"{name}_log", first)
                led = Applied(rows_of(before[name]), key).apply(changes)
                assert bag_of(led.rows) == bag_of(rows_of(after[name])), (name, epoch)
        assert_no_orphans(spark, stack.lake)
