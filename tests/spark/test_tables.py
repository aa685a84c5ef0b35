"""Tables come, pause, go on and are copied again, through the command line, while the others go on."""

import json
import threading
from dataclasses import replace

import psycopg
import pytest

from spark_consumers import Source, read
from spark_consumers.lake.flush import flush
from spark_consumers.lake.format.iceberg import IcebergFormat
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.writer import requests
from tests.support import bank_load
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import PUBLISHED, unreadable
from tests.support.log_trim import trim
from tests.support.stack import Stack
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause, CorruptError, TrimmedError

NAMES = [f"{STREAM}.{relation}" for relation in PUBLISHED]
ACCOUNTS, AUDIT, MOVES = (f"shop.public.{name}" for name in ("accounts", "audit", "moves"))
LATE = "shop.public.late"


def head(stack):
    return open_chain(stack.lake).head()


def table_command(stack, *arguments):
    """What a `tuskline table` command answers, by table."""
    done = stack.cli("table", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return {row["table"]: row for row in json.loads(done.stdout.splitlines()[-1])["tables"]}


def next_epochs(stack, count=2):
    """Let the lake publish some more epochs."""
    link = head(stack).link
    wait_for(lambda: head(stack).link >= link + count, 60, "epochs go on")


@pytest.mark.long
@pytest.mark.timeout(500)
def test_22_tables_are_added_paused_resumed_and_resynced_while_the_others_go_on(
    tmp_path, database, spark, seed
):
    database.execute(*bank_load.TABLES)
    first = ("public.accounts", "public.moves", "public.audit")
    with Stack(tmp_path, {"shop": database.dsn}, epoch_interval=2, tables=first) as stack:
        stack.start("log-server", "bridge", "lake")
        wait_for(lambda: (h := head(stack)) and len(h.tables) == 3, 120, "the first epochs")
        with bank_load.load(database.dsn, seed):
            began = head(stack)
            database.execute(
                "CREATE TABLE late (id int PRIMARY KEY, body text)",
                "INSERT INTO late SELECT g, repeat('x', 100) FROM generate_series(1, 5000) g",
            )
            added = table_command(stack, "add", "public.late", "--wait")
            assert added[LATE]["outcome"] == "is copied"
            assert head(stack).tables[LATE].rows == 5000

            paused = table_command(stack, "pause", "public.audit", "--wait")
            assert paused[AUDIT]["outcome"] == "is paused"
            next_epochs(stack)
            shown = table_command(stack, "list")
            assert (shown[AUDIT]["state"], shown[ACCOUNTS]["state"]) == ("paused", "live")
            assert shown[AUDIT]["as_of"] < head(stack).epoch

            before = head(stack).tables
            assert table_command(stack, "resync", "shop.public.accounts", "--wait")
            after = head(stack).tables
            assert after[ACCOUNTS].path != before[ACCOUNTS].path
            assert after[MOVES].path == before[MOVES].path

            # And while nobody is there to do it.
            assert stack.stop("lake") == 0
            asked = table_command(stack, "resume", "public.audit")
            assert asked[AUDIT]["outcome"] == "requested"
            refused = stack.cli("table", "pause", "public.nothing", "--wait", "--timeout", "0")
            assert refused.returncode == Cause.TIMEOUT
            assert "not carried out yet; it stays" in refused.stderr
            stack.start("lake")
            wait_for(lambda: head(stack).tables[AUDIT].state == "live", 90, "the resume")
            refused = stack.cli("table", "pause", "public.nothing", "--wait")
            assert refused.returncode == Cause.LAKE
            assert "it is not in the lake" in refused.stderr
            next_epochs(stack)
        flush(
            stack.lake,
            stack.log_address,
            [Source("shop", database.dsn, "tuskline_shop")],
            timeout=90,
        )
        assert stack.stop("lake") == 0
        assert_equal(database.dsn, read(spark, stack.lake))
        states = _check_every_epoch(spark, stack.lake, began.epoch)
        assert {"paused", "live"} <= states
        assert_no_orphans(spark, stack.lake)


def _check_every_epoch(spark, lake, first):
    """Every epoch has whole transactions, and a table that is paused has those of its own epoch."""
    states = set()
    for manifest in open_chain(lake).links():
        if manifest.epoch < first:
            continue
        snapshot = read(spark, lake, epoch=manifest.epoch)
        audit = snapshot.manifest.tables[AUDIT]
        states.add(audit.state)
        assert all(t.state == "live" for n, t in snapshot.manifest.tables.items() if n != AUDIT)
        if audit.state == "live":
            bank_load.check(snapshot)
            continue
        assert snapshot.stale == (
            {AUDIT: f"as of epoch {audit.as_of}: {audit.state}"} if snapshot.stale else {}
        )
        if snapshot.stale and audit.state != "paused":
            # Its pause has ended: it is left out until it has what the others have.
            assert AUDIT not in snapshot.tables
            continue
        then = read(spark, lake, epoch=audit.as_of)
        bank_load.check(then)
        assert audit.snapshot_id == then.manifest.tables[AUDIT].snapshot_id
        moves = sum(row.moves for row in snapshot["accounts"].select("moves").collect())
        assert moves == 2 * snapshot["moves"].count()
        assert moves >= snapshot["audit"].count()
    return states


def test_19_what_was_trimmed_is_named_with_its_repair(pipeline, database):
    """A paused table whose log is gone is copied again; a lake whose position is gone says which and how."""
    pipeline.all_or_nothing()
    docs, bag = f"{STREAM}.public.docs", f"{STREAM}.public.bag"
    chain = open_chain(pipeline.lake)
    paused = requests.ask(chain, "pause", [bag])
    pipeline.flush()
    assert requests.finished(pipeline.head(), paused) == {bag: "is paused"}
    database.execute("UPDATE docs SET n = 1", "DELETE FROM bag WHERE t IS NULL")
    assert pipeline.flush()["bag"].count() == 5
    database.execute(
        "UPDATE docs SET title = 'behind' WHERE id < 4", "UPDATE pairs SET tags = NULL"
    )
    pipeline.barrier()
    low = trim(pipeline.log, STREAM)
    with pytest.raises(TrimmedError, match=rf"(?s)kept from offset {low}.*tuskline table resync"):
        pipeline.flush()
    held = pipeline.head()
    assert {n: t.state for n, t in held.tables.items()} == {
        name: "paused" if name == bag else "held" for name in NAMES
    }
    for name in NAMES:
        requests.ask(chain, "resume" if name == bag else "resync", [name])
    pipeline.house._began_at = float("-inf")

    def all_live():
        pipeline.house.run_once(force=True)
        return all(t.state == "live" for t in pipeline.head().tables.values())

    wait_for(all_live, 60, "the copies")
    told = {a["tables"].get(bag) for a in pipeline.head().answered.values()} - {None}
    assert any("copied again: the log is trimmed" in str(answer) for answer in told)
    assert pipeline.head().tables[docs].path != held.tables[docs].path
    assert_equal(database.dsn, pipeline.flush())


def test_a_table_that_does_not_belong_to_its_log_holds_alone_what_it_must(
    pipeline, database, monkeypatch
):
    """Its changes do not follow from one another: it is named; paused, the others go on; resynced, it is whole."""
    pipeline.all_or_nothing()
    docs, chain = f"{STREAM}.public.docs", open_chain(pipeline.lake)
    tables = pipeline.house._writer.head.tables
    # As if the lake had lost the last epoch of this table alone.
    database.execute("UPDATE docs SET title = 'never seen' WHERE id = 3")
    broken = pipeline.flush().manifest.tables[docs]

    def lost(self, path, *_):
        if "/docs%" in path:
            raise CorruptError("expected 3 rows after the epoch, found 2", where=docs)

    monkeypatch.setattr(IcebergFormat, "_check_count", lost)
    database.execute("UPDATE docs SET title = 'x' WHERE id = 3", "UPDATE pairs SET tags = '{5}'")
    with pytest.raises(
        CorruptError, match=r"(?s)holds the epochs back: expected 3 rows.*table resync"
    ):
        pipeline.flush()
    assert pipeline.head().tables[docs].state == "held"
    requests.ask(chain, "pause", [docs])
    others = pipeline.flush()
    assert others["pairs"].first().tags == [5]
    assert others.manifest.tables[docs].snapshot_id == broken.snapshot_id
    monkeypatch.undo()
    requests.ask(chain, "resync", [docs])

    def live():
        pipeline.flush()
        return pipeline.head().tables[docs].state == "live"

    wait_for(live, 60, "the copy")
    assert_equal(database.dsn, pipeline.flush())
    assert tables[docs].path != pipeline.head().tables[docs].path


def test_a_copy_that_is_not_allowed_stops_nobody(pipeline, database, monkeypatch):
    monkeypatch.setattr("spark_consumers.lake.writer.table_work._AFTER_FAILURE", 0.1)
    role = f"copier_{database.name}"
    database.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'copies'",
        f"GRANT USAGE ON SCHEMA tuskline TO {role}",
        f"GRANT ALL ON tuskline.flush TO {role}",
        "CREATE TABLE closed (id int PRIMARY KEY)",
        "INSERT INTO closed VALUES (1)",
        f"ALTER PUBLICATION {PUBLICATION} ADD TABLE closed",
    )
    dsn = psycopg.conninfo.make_conninfo(database.dsn, user=role, password="copies")
    closed = f"{STREAM}.public.closed"
    try:
        pipeline.house.close()
        house = pipeline.lakehouse()
        house._sources[STREAM] = replace(Source(STREAM, dsn, PUBLICATION))

        def told():
            database.execute("UPDATE docs SET n = n + 1")
            pipeline.flush(house)
            return "permission denied" in pipeline.head().not_copied.get(closed, "")

        wait_for(told, 60, "the refusal in the manifest")
        # A live table that is copied again goes on as it is.
        requests.ask(open_chain(pipeline.lake), "resync", [f"{STREAM}.public.docs"])

        def both():
            told()
            return f"{STREAM}.public.docs" in pipeline.head().not_copied

        wait_for(both, 60, "the second refusal")
        snapshot = pipeline.flush(house)
        assert closed not in snapshot.tables
        assert not snapshot.stale
        assert_equal(database.dsn, snapshot)
        database.execute(f"GRANT SELECT ON closed, docs TO {role}")
        pipeline.wait_for_tables("closed", house=house)
        wait_for(lambda: not (told() or pipeline.head().not_copied), 60, "no refusal any more")
        assert_equal(database.dsn, pipeline.flush(house))
    finally:
        database.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_a_copy_that_failed_is_made_with_the_columns_that_the_table_has_by_then(
    pipeline, database, monkeypatch
):
    monkeypatch.setattr("spark_consumers.lake.writer.table_work._AFTER_FAILURE", 0.1)
    database.execute(
        "CREATE TABLE prices (id int PRIMARY KEY, price numeric(10, 2))",
        "INSERT INTO prices VALUES (1, 'NaN')",
        f"ALTER PUBLICATION {PUBLICATION} ADD TABLE prices",
    )

    def refused():
        pipeline.flush()
        return pipeline.head().not_copied.get(f"{STREAM}.public.prices")

    assert "price" in wait_for(refused, 60, "the refusal in the manifest")
    database.execute(
        "ALTER TABLE prices ALTER price TYPE text, ADD note text DEFAULT 'given'",
    )
    pipeline.wait_for_tables("prices")
    shown = pipeline.flush()
    assert [tuple(row) for row in shown["prices"].collect()] == [(1, "NaN", "given")]
    assert_equal(database.dsn, shown)


def test_a_copy_has_the_integers_of_a_database_that_quotes_all_identifiers(pipeline, database):
    """The driver looks for a type by its function's name, and the bytes of these integers are digits."""
    database.execute(
        f"ALTER DATABASE {database.name} SET quote_all_identifiers = on",
        "CREATE TABLE codes (id smallint PRIMARY KEY, n int, t text)",
        "INSERT INTO codes VALUES (12337, 892745528, 'x')",
        f"ALTER PUBLICATION {PUBLICATION} ADD TABLE codes",
    )
    pipeline.wait_for_tables("codes")
    shown = pipeline.flush()
    assert [tuple(row) for row in shown["codes"].collect()] == [(12337, 892745528, "x")]
    assert_equal(database.dsn, shown)


def test_34_a_flush_waits_for_a_table_that_is_copied_or_names_it(pipeline, database):
    sources = [Source(STREAM, database.dsn, PUBLICATION)]
    where = str(pipeline.lake), pipeline.log.address, sources
    stop = threading.Event()
    driver = threading.Thread(target=pipeline.house.run, args=(stop,))
    driver.start()
    try:
        database.execute(
            "CREATE TABLE late (id int PRIMARY KEY)",
            "INSERT INTO late SELECT generate_series(1, 5)",
            f"ALTER PUBLICATION {PUBLICATION} ADD TABLE late",
        )
        with psycopg.connect(database.dsn) as blocking:
            # A copy's snapshot waits for the transactions that run.
            blocking.execute("INSERT INTO late VALUES (6)")
            told = unreadable(lambda seconds: flush(*where, timeout=seconds))
            assert f"without {STREAM}.public.late" in told
        epoch = flush(*where, timeout=90)
        shown = read(pipeline.spark, pipeline.lake)
        assert shown.epoch >= epoch
        assert_equal(database.dsn, shown)
        assert shown["late"].count() == 6
    finally:
        stop.set()
        driver.join()
