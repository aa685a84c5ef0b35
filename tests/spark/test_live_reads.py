"""Live reads: the newest version of the log over all tables, before the epoch that has it is written."""

import random
import threading

import psycopg
import pytest

from spark_consumers import read
from spark_consumers.lake import reader
from spark_consumers.lake.epoch import plan
from spark_consumers.lake.live import log_tail, tail
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.writer import requests
from tests.support.capture_stack import STREAM, ChangeLog
from tests.support.lake_check import assert_equal
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.errors import LakeError, UsageError


def live(pipeline, **options):
    """A live read of everything that was committed before."""
    pipeline.barrier()
    return read(pipeline.spark, pipeline.lake, live=True, log=pipeline.log.address, **options)


CHANGES = (
    # Nothing but a row with an unsent value.
    "UPDATE docs SET title = 'alone' WHERE id = 9",
    # The first sets the TOASTed value, the second leaves it.
    "UPDATE docs SET body = repeat('new', 2000) WHERE id = 1",
    "UPDATE docs SET title = 'again' WHERE id = 1",
    # Never sent: it has to come from the table.
    "UPDATE docs SET title = 'kept' WHERE id IN (2, 3)",
    # Two rows swap their keys, and keep their unsent values.
    "UPDATE docs SET id = CASE id WHEN 4 THEN 5 ELSE 4 END + 100 WHERE id IN (4, 5)",
    "UPDATE docs SET id = id - 100 WHERE id > 100",
    "DELETE FROM docs WHERE id = 6",
    "INSERT INTO docs VALUES (6, 'reborn', NULL, 1.5, 'NaN')",
    "UPDATE pairs SET b = 'z', tags = '{}' WHERE a = 1",
    # One of three equal rows goes; the row with -0 is another one.
    "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE t = 'three')",
    "UPDATE bag SET a = 7 WHERE t IS NULL",
    "INSERT INTO bag SELECT * FROM bag WHERE f = 'NaN'",
)


@pytest.mark.parametrize(
    ("size", "each"),
    [
        pytest.param("small", True, id="small"),
        pytest.param("sent", False, id="sent"),
        pytest.param("stored", False, id="stored"),
        pytest.param("sent", True, id="sent each", marks=pytest.mark.long),
        pytest.param("stored", True, id="stored each", marks=pytest.mark.long),
    ],
)
def test_a_live_read_has_what_no_epoch_has_yet(pipeline, database, monkeypatch, size, each):
    """`sent`, `stored`: as if the tail were larger, and composed by the executors. `each`: it is read behind each change."""
    if size == "sent":
        monkeypatch.setattr(log_tail, "_OWN", -1)
    if stored := size == "stored":
        monkeypatch.setattr(plan, "RANGE_BYTES", 1)
        monkeypatch.setattr(plan, "COMPOSED_RANGES", 2)
        monkeypatch.setattr(log_tail, "_SMALL", 0)
    before = pipeline.head()
    assert_equal(database.dsn, live(pipeline), counted=False)
    for number, change in enumerate(CHANGES):
        database.execute(change)
        if each or number % 4 == 0:
            assert_equal(database.dsn, live(pipeline), counted=False)
    database.execute("TRUNCATE pairs", "INSERT INTO pairs VALUES (5, 'new', NULL, NULL)")
    snapshot = live(pipeline)
    assert_equal(database.dsn, snapshot, counted=False)
    database.execute("TRUNCATE docs, bag", "INSERT INTO bag VALUES (1, '-0', 'x', NULL)")
    assert_equal(database.dsn, live(pipeline), counted=False)
    assert pipeline.head().link == before.link, "no epoch was written"
    assert len(snapshot["docs"].collect()) == 9, "an earlier one stays as it was"
    assert_equal(database.dsn, pipeline.flush())
    assert bool([*pipeline.lake.glob("_tuskline/live/*")]) == stored


def test_2_no_read_behind_a_live_one_goes_back(pipeline, database, monkeypatch):
    monkeypatch.setattr(reader, "_PATIENCE", 0.5)
    database.execute("DELETE FROM docs WHERE id > 2")
    seen = live(pipeline)
    assert seen["docs"].count() == 2
    with pytest.raises(LakeError, match=f"this session has read epoch {seen.epoch}, but"):
        read(pipeline.spark, pipeline.lake)
    later = pipeline.flush()
    assert later.epoch >= seen.epoch
    assert later["docs"].count() == 2
    assert live(pipeline).epoch >= later.epoch


def test_2_a_table_that_is_paused_behind_a_live_read_does_not_go_back(pipeline, database):
    """A pause takes the rows of the newest epoch, and the session has read later ones."""
    database.execute("UPDATE docs SET title = 'seen'")
    seen = live(pipeline)
    docs = f"{STREAM}.public.docs"
    requests.ask(open_chain(pipeline.lake), "pause", [docs, f"{STREAM}.public.bag"])
    pipeline.flush()
    for found in (pipeline.flush(), live(pipeline)):
        assert docs not in found.tables
        assert "bag" not in found.tables
        assert_equal(database.dsn, found, counted=False)
        with pytest.raises(LakeError, match=f"has read version {seen.epoch} of it, .*: paused"):
            found["docs"]
    stale = live(pipeline, allow_stale=True)
    assert {row.title for row in stale["docs"].collect()} == {f"t{n}" for n in range(1, 10)}
    assert docs in read(pipeline.spark, pipeline.lake, epoch=pipeline.head().epoch).tables
    requests.ask(open_chain(pipeline.lake), "resume", [docs])
    pipeline.flush()
    assert_equal(database.dsn, pipeline.flush(), counted=False)
    assert docs in live(pipeline).tables


def test_14_a_table_that_gets_a_column_is_left_out_until_the_next_epoch(pipeline, database):
    database.execute(
        "ALTER TABLE docs ADD COLUMN pages int",
        "UPDATE docs SET pages = id",
        "UPDATE pairs SET tags = '{9}'",
    )
    found = live(pipeline)
    assert found.tables == [f"{STREAM}.public.{name}" for name in ("bag", "pairs")]
    assert_equal(database.dsn, found, counted=False)
    with pytest.raises(LakeError, match="its columns have changed"):
        found["docs"]
    stale = live(pipeline, allow_stale=True)
    assert stale["docs"].columns == ["id", "title", "body", "n", "f"]
    assert "its columns have changed" in stale.stale[f"{STREAM}.public.docs"]
    pipeline.flush()
    assert_equal(database.dsn, live(pipeline), counted=False)


def test_a_reader_that_cannot_write_reads_what_can_be_sent(pipeline, database, monkeypatch):
    monkeypatch.setattr(reader, "lease_on", lambda _: None)
    database.execute("UPDATE docs SET title = 'sent'")
    assert_equal(database.dsn, live(pipeline), counted=False)
    # On the executors, which are other processes, by a longer value.
    database.execute(
        f"UPDATE pairs SET b = 'x'; UPDATE docs SET body = repeat('x', {tail._SENT_BYTES})"
    )
    found = live(pipeline)
    assert_equal(database.dsn, found, counted=False)
    assert f"{STREAM}.public.docs" not in found.tables
    with pytest.raises(LakeError, match="cannot write to the lake's folder"):
        found["docs"]


def test_a_log_that_is_not_the_lakes_is_refused(pipeline, tmp_path):
    (tmp_path / "other").mkdir()
    with (
        ChangeLog(tmp_path / "other") as other,
        pytest.raises(LakeError, match="the lake is of log"),
    ):
        read(pipeline.spark, pipeline.lake, live=True, log=other.address)
    with pytest.raises(UsageError, match="of a change log"):
        read(pipeline.spark, pipeline.lake, live=True)
    with pytest.raises(UsageError):
        read(pipeline.spark, pipeline.lake, epoch=1, live=True, log=pipeline.log.address)


def test_the_log_keeps_what_a_live_read_needs(pipeline, monkeypatch):
    """The lease is there before the log's status is read, and is of the epoch that the read began with."""
    asked = []
    for name in ("register_consumer", "status"):
        really = getattr(LogClient, name)

        def spy(self, *given, name=name, really=really):
            asked.append((name, *given))
            return really(self, *given)

        monkeypatch.setattr(LogClient, name, spy)
    for _ in range(2):
        read(pipeline.spark, pipeline.lake, live=True, log=pipeline.log.address, consumer="etl")
    names = {given[1] for given in asked if given[0] == "register_consumer"}
    assert len(names) == 1
    assert names.pop().startswith("etl-")
    assert [given[0] for given in asked] == ["status", "register_consumer", "status"] * 2
    assert {given[2] for given in asked if len(given) > 1} == {pipeline.head().epoch}


def test_3_live_reads_under_load_are_of_one_state_of_all_tables(pipeline, database, seed):
    """Each transaction moves a piece of two tables' sum, inserts, deletes and changes keys."""
    print(f"seed {seed}")
    drawn, stop = random.Random(seed), threading.Event()
    database.execute(
        "INSERT INTO docs SELECT g, 't', NULL, 100, 0 FROM generate_series(10, 200) g",
        "INSERT INTO bag SELECT 100, 0, 'sum', NULL FROM generate_series(1, 50)",
    )
    pipeline.flush()

    def load():
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            while not stop.is_set():
                by, one, new = drawn.randrange(50), drawn.randrange(10, 200), drawn.randrange(10**6)
                with connection.transaction():
                    connection.execute(
                        "UPDATE docs SET n = n - %s, id = id WHERE id = %s", (by, one)
                    )
                    connection.execute(
                        "UPDATE bag SET a = a + %s WHERE ctid = (SELECT min(ctid) FROM bag WHERE t = 'sum')"
                        " AND EXISTS (SELECT FROM docs WHERE id = %s)",
                        (by, one),
                    )
                    connection.execute(
                        "UPDATE docs SET id = %s WHERE id = %s AND NOT EXISTS (SELECT FROM docs WHERE id = %s)",
                        (new, drawn.randrange(10, 200), new),
                    )

    thread = threading.Thread(target=load)
    thread.start()
    last, versions = 0, set()
    try:
        for number in range(10):
            if number == 5:
                pipeline.flush()
            found = live(pipeline)
            docs = (
                found["docs"].where("id >= 10").selectExpr("sum(n) AS s", "count(*) AS c").first()
            )
            bag = found["bag"].where("t = 'sum'").selectExpr("sum(a) AS s", "count(*) AS c").first()
            assert (docs.s + bag.s, docs.c, bag.c) == (19_100 + 5_000, 191, 50), found.epoch
            assert found.epoch >= last
            last = found.epoch
            versions.add(last)
    finally:
        stop.set()
        thread.join(60)
    assert len(versions) > 6
    assert_equal(database.dsn, live(pipeline), counted=False)
