"""The pipeline from PostgreSQL to epochs: real server, real capture, real log, real tables."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from spark_consumers import Source, read
from spark_consumers.lake.epoch import epoch_writer as epoch_module
from spark_consumers.lake.epoch import plan, stage
from spark_consumers.lake.format.iceberg import IcebergFormat
from spark_consumers.lake.manifest import reader_leases, takeover
from spark_consumers.lake.manifest.chain import LEFT, LIVE, Manifest, open_chain
from spark_consumers.lake.reader import Snapshot
from spark_consumers.lake.store.local_store import LocalStore
from spark_consumers.lake.writer import requests
from spark_consumers.lake.writer.lake_site import LakeSite
from spark_consumers.lake.writer.leases import Leases
from spark_consumers.lake.writer.presence import Presence
from spark_consumers.lake.writer.standby import Standby
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.errors import (
    CorruptError,
    FencedError,
    LakeError,
    TrimmedError,
    UsageError,
)
from walsender_bridge.runtime.sql import load


def test_the_copy_is_the_tables(pipeline, database):
    snapshot = pipeline.flush()
    assert snapshot.tables == [f"{STREAM}.public.{name}" for name in ("bag", "docs", "pairs")]
    assert_equal(database.dsn, snapshot)
    assert snapshot["bag"].columns == ["a", "f", "t", "l"]


@pytest.mark.both_formats
def test_29_30_every_change_arrives_column_by_column(pipeline, database):
    database.execute(
        # 29: the first sets the TOASTed value, the second leaves it; both in one epoch.
        "UPDATE docs SET body = repeat('new', 2000) WHERE id = 1",
        "UPDATE docs SET title = 'again' WHERE id = 1",
        # Never sent: it has to come from the table.
        "UPDATE docs SET title = 'kept' WHERE id IN (2, 3)",
        # Two rows swap their keys, and keep their unsent values.
        "BEGIN; UPDATE docs SET id = 100 WHERE id = 4; UPDATE docs SET id = 4 WHERE id = 5;"
        " UPDATE docs SET id = 5 WHERE id = 100; COMMIT",
        "DELETE FROM docs WHERE id = 6",
        "INSERT INTO docs VALUES (6, 'reborn', NULL, 1.5, 'NaN')",
        "UPDATE pairs SET b = 'z', tags = '{}' WHERE a = 1",
        # 30: one of three equal rows goes; the row with -0 is another one.
        "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE t = 'three')",
        "UPDATE bag SET a = 7 WHERE t IS NULL",
    )
    snapshot = pipeline.flush()
    assert_equal(database.dsn, snapshot)
    rows = [tuple(row) for row in snapshot["bag"].collect()]
    assert [r[2] for r in rows].count("three") == 3
    assert {r.id: r.title for r in snapshot["docs"].collect()}[1] == "again"
    # And again over what that has written.
    database.execute(
        "UPDATE docs SET n = n + 1",
        "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE t = 'three')",
        "TRUNCATE pairs",
        "INSERT INTO pairs VALUES (5, 'new', NULL, NULL)",
    )
    assert_equal(database.dsn, pipeline.flush())
    database.execute("TRUNCATE docs, bag")
    assert_equal(database.dsn, pipeline.flush())
    assert_no_orphans(pipeline.spark, pipeline.lake)


@pytest.mark.long
def test_nan_is_the_greatest_number_whether_files_are_skipped_or_not(pipeline, database):
    """As in PostgreSQL; the bounds that data files could have leave it out."""
    database.execute(
        "UPDATE docs SET f = id, n = 1 WHERE id < 5",
        "UPDATE docs SET f = 'NaN' WHERE id = 3",
    )
    docs = pipeline.flush()["docs"]
    with database.connect() as connection:
        greatest, above = connection.execute(
            "SELECT max(f)::text, count(*) FILTER (WHERE f > 100) FROM docs"
        ).fetchone()
    assert greatest == "NaN"
    assert docs.selectExpr("CAST(max(f) AS string)").first()[0] == "NaN"
    assert docs.where("f > 100").count() == above == 1


def test_many_ranges_make_one_epoch(pipeline, database, monkeypatch):
    monkeypatch.setattr(plan, "RANGE_BYTES", 1)
    before = pipeline.head()
    for round_ in range(6):
        database.execute(
            f"UPDATE docs SET title = 'r{round_}' WHERE id % 2 = {round_ % 2}",
            f"UPDATE docs SET id = id + 10 WHERE id = {round_ + 1}",
            "INSERT INTO bag SELECT * FROM bag WHERE ctid = (SELECT min(ctid) FROM bag)",
            "DELETE FROM bag WHERE ctid = (SELECT max(ctid) FROM bag)",
        )
        # The log has it before the next one comes: each is a version of its own.
        pipeline.barrier()
    snapshot = pipeline.flush()
    assert snapshot.manifest.link == before.link + 1
    assert_equal(database.dsn, snapshot)
    assert_no_orphans(pipeline.spark, pipeline.lake)


def test_a_backlog_becomes_several_epochs_each_whole(pipeline, database):
    house = pipeline.lakehouse(max_bytes_per_epoch=1)
    for _ in range(3):
        database.execute("BEGIN; UPDATE docs SET n = n + 1; UPDATE pairs SET a = a + 1; COMMIT")
        # The log has it before the next one comes: each is a version of its own.
        pipeline.barrier()
    first = pipeline.head().link
    assert_equal(database.dsn, pipeline.flush(house))
    links = [m for m in open_chain(pipeline.lake).links() if m.link > first + 1]
    assert len(links) >= 3
    for manifest in links:
        snapshot = read(pipeline.spark, pipeline.lake, epoch=manifest.epoch)
        moves = {row.n - row.id for row in snapshot["docs"].collect()}
        shifts = {row.a - {"x": 1, "y": 2}[row.b] for row in snapshot["pairs"].collect()}
        assert moves == shifts


def test_compaction_changes_files_and_no_rows(pipeline, database, monkeypatch):
    monkeypatch.setattr(epoch_module, "_COMPACT_FILES", 1)
    for round_ in range(4):
        database.execute(
            f"UPDATE docs SET title = 'r{round_}' WHERE id % 5 = {round_}",
            "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag)",
        )
        assert_equal(database.dsn, pipeline.flush())
    names = {file.name for file in pipeline.lake.glob("tables/*/*/*/data/*-rewritten-*")}
    assert names
    for manifest in open_chain(pipeline.lake).links():
        if manifest.readable:
            snapshot = read(pipeline.spark, pipeline.lake, epoch=manifest.epoch)
            for name in snapshot.tables:
                assert len(snapshot[name].collect()) == manifest.tables[name].rows


def test_7_a_round_that_is_repeated_adds_nothing_twice(pipeline, database, monkeypatch):
    database.execute(
        "UPDATE docs SET title = 'once'", "INSERT INTO bag SELECT * FROM bag", "DELETE FROM pairs"
    )
    chain = pipeline.house._chain
    publish = chain.publish
    broken: list[Manifest] = []

    def fail_once(manifest, head):
        if not broken:
            broken.append(manifest)
            raise OSError(28, "No space left on device")
        publish(manifest, head)

    monkeypatch.setattr(chain, "publish", fail_once)
    with pytest.raises(OSError, match="No space"):
        pipeline.flush()
    assert broken
    pipeline.house._failed(OSError("told"), 0.0)
    snapshot = pipeline.flush()
    assert_equal(database.dsn, snapshot)
    # The range was the same, so the tables have the snapshots of the first attempt.
    if snapshot.epoch == broken[0].epoch:
        assert snapshot.manifest.tables == broken[0].tables
    assert_no_orphans(pipeline.spark, pipeline.lake)


def test_13_a_stale_writer_is_refused_at_its_tables_and_at_the_manifest(
    pipeline, database, monkeypatch
):
    stale = pipeline.house
    chain, epochs = stale._chain, stale._writer.epochs
    write = type(epochs)._write_table
    newer = pipeline.lakehouse()
    seen: list[int] = []

    def sleep_then_write(self, *arguments):
        """Woken up after another writer has published two epochs."""
        if self is epochs and not seen:
            for _ in range(2):
                database.execute("UPDATE docs SET n = n + 1")
                seen.append(pipeline.flush(newer).epoch)
        return write(self, *arguments)

    monkeypatch.setattr(type(epochs), "_write_table", sleep_then_write)
    database.execute("UPDATE docs SET title = 'stale'")
    with pytest.raises(FencedError, match="may no longer write this table"):
        pipeline.flush(stale)
    head = chain.head()
    assert head.epoch == seen[-1]
    old = stale._writer.head
    with pytest.raises(FencedError, match="cannot publish link"):
        chain.publish(old.next(old.steady_at, epoch=10**9), old)
    with pytest.raises(FencedError, match="has taken over"):
        stale._failed(RuntimeError("the round failed"), 0.0)
    assert_equal(database.dsn, pipeline.flush(newer))


def test_22_a_table_that_is_added_comes_while_the_others_go_on(pipeline, database, monkeypatch):
    monkeypatch.setattr("spark_consumers.lake.tables.publication_poller.POLL_SECONDS", 0.0)
    database.execute(
        "CREATE TABLE late (id int PRIMARY KEY, body text)",
        "INSERT INTO late SELECT g, repeat('x', 100) FROM generate_series(1, 5000) g",
        # A key that the lake cannot tell rows apart by: this table is set aside, by name.
        "CREATE TABLE odd (key int[] PRIMARY KEY)",
        f"ALTER PUBLICATION {PUBLICATION} ADD TABLE late, odd",
    )
    rounds = 0
    while f"{STREAM}.public.late" not in pipeline.head().readable:
        rounds += 1
        database.execute(
            "UPDATE docs SET n = n + 1", f"UPDATE late SET body = 'u{rounds}' WHERE id % 7 = 0"
        )
        time.sleep(0.1)
        pipeline.house.run_once(force=True)
        assert rounds < 300
    snapshot = pipeline.flush()
    assert_equal(database.dsn, snapshot)
    aside = snapshot.manifest.not_copied
    assert list(aside) == [f"{STREAM}.public.odd"]
    with pytest.raises(LakeError, match="its key contains the array 'key'"):
        snapshot[f"{STREAM}.public.odd"]
    # And a table that leaves stays as it was; when it comes again, it is copied again.
    database.execute(f"ALTER PUBLICATION {PUBLICATION} DROP TABLE late", "DELETE FROM late")
    pipeline.flush()
    left = pipeline.flush()
    assert left.manifest.tables[f"{STREAM}.public.late"].state == "left"
    assert left["late"].count() == 5000
    database.execute(f"ALTER PUBLICATION {PUBLICATION} ADD TABLE late")

    def copied_again():
        pipeline.flush()
        return pipeline.head().tables[f"{STREAM}.public.late"].state == LIVE

    wait_for(copied_again, 60, "the second copy")
    assert_equal(database.dsn, pipeline.flush())


def test_epochs_stay_readable_until_they_expire(pipeline, database, monkeypatch):
    monkeypatch.setattr(reader_leases, "HOLD", 0.0)
    expected = {}
    for round_ in range(4):
        database.execute(f"UPDATE docs SET n = {round_}")
        expected[pipeline.flush().epoch] = round_
    for epoch, round_ in expected.items():
        rows = read(pipeline.spark, pipeline.lake, epoch=epoch)["docs"].collect()
        assert {int(row.n) for row in rows} == {round_}
    writer = pipeline.house._writer
    writer.kept.expire(writer.head, 0.0)
    *gone, last = expected
    for epoch in gone:
        with pytest.raises(TrimmedError, match="has expired"):
            read(pipeline.spark, pipeline.lake, epoch=epoch)
    assert {
        int(r.n) for r in read(pipeline.spark, pipeline.lake, epoch=last)["docs"].collect()
    } == {3}
    assert_equal(database.dsn, pipeline.flush())
    assert_no_orphans(pipeline.spark, pipeline.lake)


def test_10_what_a_reader_holds_outlives_its_retention(pipeline, database, monkeypatch):
    monkeypatch.setattr(reader_leases, "HOLD", 0.0)
    held = pipeline.flush()
    frame = held["docs"]
    for round_ in range(3):
        database.execute(f"UPDATE docs SET n = {round_}", "DELETE FROM pairs")
        pipeline.flush()
    writer, chain = pipeline.house._writer, open_chain(pipeline.lake)
    writer.kept.expire(writer.head, 0.0)
    assert chain.has(held.manifest.link)
    assert (frame.count(), held["docs"].count(), held["pairs"].count()) == (9, 9, 2)
    # Nobody holds it: what is not there any more is said by us, and not by Spark.
    manifest = held.manifest
    del held, frame
    gc.collect()
    lease = reader_leases.lease_on(chain.store)
    assert lease is not None
    lease.refresh()
    writer.kept.expire(writer.head, 0.0)
    assert not chain.has(manifest.link)
    with pytest.raises(TrimmedError, match=f"epoch {manifest.epoch} has expired"):
        Snapshot(pipeline.spark, chain.root, manifest)["docs"]
    with pytest.raises(TrimmedError, match="has expired"):
        read(pipeline.spark, pipeline.lake, epoch=manifest.epoch)
    assert_no_orphans(pipeline.spark, pipeline.lake)


def test_readers_get_one_epoch_and_errors_with_names(pipeline, database):
    snapshot = pipeline.flush()
    pinned = snapshot["docs"]
    database.execute("DELETE FROM docs", "DELETE FROM pairs")
    later = pipeline.flush()
    assert later.epoch > snapshot.epoch
    assert (pinned.count(), later["docs"].count()) == (9, 0)
    assert list(snapshot.register_views("old")) == [
        "old_public_bag",
        "old_public_docs",
        "old_public_pairs",
    ]
    assert pipeline.spark.table("old_public_docs").count() == 9
    assert snapshot["public.docs"].count() == snapshot[f"{STREAM}.public.docs"].count()
    assert snapshot.positions[STREAM].lsn < later.positions[STREAM].lsn
    with pytest.raises(LakeError, match=r"similar names: .*docs"):
        later["public.dosc"]
    with pytest.raises(UsageError):
        read(pipeline.spark, pipeline.lake, epoch=1, as_of=1.0)
    now = read(pipeline.spark, pipeline.lake, as_of=time.time())
    assert now.epoch == later.epoch


@pytest.mark.both_formats
def test_2_a_session_never_goes_back(pipeline, monkeypatch):
    snapshot = pipeline.flush()
    pipeline.database.execute("UPDATE docs SET n = 5")
    newer = pipeline.flush()
    monkeypatch.setattr("spark_consumers.lake.reader._PATIENCE", 0.2)
    (pipeline.lake / "_tuskline" / "epochs" / f"{newer.manifest.link:020d}.json").unlink()
    with pytest.raises(CorruptError, match=rf"\(epoch {newer.epoch}\) was published and is lost"):
        read(pipeline.spark, pipeline.lake)
    (
        pipeline.lake / "_tuskline" / "newest.json"
    ).unlink()  # the error's own advice: go on from what is left
    with pytest.raises(LakeError, match=f"has read epoch {newer.epoch}"):
        read(pipeline.spark, pipeline.lake)
    then = read(pipeline.spark, pipeline.lake, epoch=snapshot.epoch)
    assert then.epoch == snapshot.epoch
    assert then["docs"].where("n = 5").count() == 1


def test_a_task_folds_in_steps_and_to_the_same(pipeline, database, monkeypatch):
    """Local tasks run in Python workers, so the limit is set where the function is called."""
    house = pipeline.house
    run = type(house._writer.epochs)._run

    def here(self, function, work, *_):
        monkeypatch.setattr(stage, "_PENDING_ROWS", 2)
        return [function(task) for task in work]

    monkeypatch.setattr(type(house._writer.epochs), "_run", here)
    database.execute("UPDATE docs SET n = n * 2", "UPDATE docs SET id = id + 50", "DELETE FROM bag")
    assert_equal(database.dsn, pipeline.flush())
    assert run is not here


def test_the_lease_is_renewed_while_nothing_is_published(pipeline):
    repository = pipeline.log.repository
    assert repository is not None
    house = pipeline.lakehouse()
    house._leases = Leases(seconds=2.0)
    pipeline.flush(house)
    before = pipeline.head()
    (name,) = repository._state.consumers
    first = repository._state.consumers[name].until

    def renewed():
        house.run_once()
        return repository._state.consumers[name].until > first

    wait_for(renewed, 20, "the lease is renewed")
    assert pipeline.head() == before


def test_the_lease_of_a_copy_that_fails_ends_though_nothing_is_published(pipeline, database):
    repository = pipeline.log.repository
    assert repository is not None
    epoch = pipeline.head().epoch
    database.execute("CREATE TABLE odd (id int[] PRIMARY KEY)")
    database.execute(f"ALTER PUBLICATION {PUBLICATION} ADD TABLE odd")
    seen = set()

    def failed():
        pipeline.house.run_once()
        seen.update(repository._state.consumers)
        return f"{STREAM}.public.odd" in pipeline.head().not_copied

    wait_for(failed, 60, "the copy fails")
    assert any("-copy-" in name for name in seen)

    def released():
        pipeline.house.run_once()
        return not any("-copy-" in name for name in repository._state.consumers)

    wait_for(released, 20, "the log is not kept for it any more")
    assert pipeline.head().epoch == epoch


def test_what_could_not_be_shown_is_shown_later_though_nothing_changes(
    pipeline, database, monkeypatch
):
    tables = IcebergFormat.show

    def fail(*_):
        raise OSError(28, "No space left on device")

    database.execute("UPDATE docs SET title = 'shown late'")
    monkeypatch.setattr(IcebergFormat, "show", fail)
    with pytest.raises(OSError, match="No space"):
        pipeline.flush()
    published = pipeline.head()
    monkeypatch.setattr(IcebergFormat, "show", tables)
    path = pipeline.lake / published.tables[f"{STREAM}.public.docs"].path

    def titles():
        return {
            row.title for row in pipeline.spark.read.format("iceberg").load(str(path)).collect()
        }

    assert titles() != {"shown late"}
    pipeline.house.run_once()
    assert titles() == {"shown late"}
    assert pipeline.head() == published


@pytest.mark.long
def test_tables_of_a_source_that_is_taken_out_stay_and_come_back_anew(pipeline, database):
    kept = pipeline.flush()
    rows = kept["docs"].count()
    with LogClient(pipeline.log.address) as log:
        # A second source, of which there is nothing but its stream.
        log.create_stream("other")
    house = pipeline.lakehouse([Source("other", database.dsn, PUBLICATION)])
    database.execute("DELETE FROM docs WHERE id = 1")
    with database.connect() as connection:
        position = connection.execute(load("flush/position")).fetchone()[0]
        connection.execute(load("flush/write"))
    with LogClient(pipeline.log.address) as log:
        log.barrier({STREAM: position}, timeout=30)
    house.run_once()
    head = pipeline.head()
    assert {t.state for t in head.tables.values()} == {LEFT}
    assert set(head.streams) == {"other"}
    # Readable, and as they were.
    assert read(pipeline.spark, pipeline.lake)["docs"].count() == rows
    back = pipeline.lakehouse()
    back.run_once(force=True)
    pipeline.flush(back)
    pipeline.wait_for_tables("docs", "pairs", "bag", house=back)

    def live():
        pipeline.flush(back)
        return {t.state for t in pipeline.head().tables.values()} == {LIVE}

    wait_for(live, 60, "the second copy")
    assert_equal(database.dsn, pipeline.flush(back))


@pytest.mark.long
def test_a_source_whose_server_is_stopped_keeps_no_other_waiting(pipeline, database, make_server):
    server = make_server(fsync="off")
    server.start()
    with LogClient(pipeline.log.address) as log:
        log.create_stream("other")
    sources = [
        Source(STREAM, database.dsn, PUBLICATION),
        Source("other", server.dsn(), PUBLICATION),
    ]
    house = pipeline.lakehouse(sources)
    pipeline.flush(house)
    # How long such a round takes on this machine now.
    database.execute("UPDATE docs SET title = 'before'")
    began = time.monotonic()
    house.run_once()
    usual = time.monotonic() - began
    os.kill(server.pid, signal.SIGSTOP)
    try:
        house._poller._asked_at = float("-inf")
        database.execute("UPDATE docs SET title = 'goes on'")
        began = time.monotonic()
        house.run_once()
        # Connecting to the other alone would take its ten seconds.
        assert time.monotonic() - began < usual + 8
        assert "other" in house._poller._asked
        assert_equal(database.dsn, pipeline.flush(house))
    finally:
        os.kill(server.pid, signal.SIGCONT)


@pytest.mark.long
def test_a_backlog_is_gone_on_with_at_once_and_not_at_the_next_interval(pipeline, database):
    house = pipeline.lakehouse(max_bytes_per_epoch=1)
    pipeline.flush(house)
    with LogClient(pipeline.log.address) as log:
        for _ in range(3):
            _commit_alone(database, log)
        newest = log.status().version
    assert house.run_once() is None, "the interval is an hour"
    house._began_at = float("-inf")
    published = []
    while (manifest := house.run_once()) is not None:
        published.append(manifest.epoch)
    assert len(published) >= 3
    assert published[-1] >= newest
    # And with nothing left it waits again.
    database.execute("UPDATE docs SET n = n + 1")
    assert house.run_once() is None


def _commit_alone(database, log):
    """A transaction that gets a version of its own."""
    before = log.status().version
    database.execute("UPDATE docs SET n = n + 1")
    wait_for(lambda: log.status().version > before, 30, "its version")


def test_what_a_copy_needs_of_the_log_is_held_until_its_table_is_shown(
    pipeline, database, monkeypatch
):
    monkeypatch.setattr("spark_consumers.lake.tables.publication_poller.POLL_SECONDS", 0.0)
    pipeline.flush()
    house, repository = pipeline.house, pipeline.log.repository
    name = house._writer.tables._copy_consumer(STREAM)
    held_at = pipeline.head().epoch
    wait_for(lambda: name not in repository._state.consumers, 30, "earlier copies hold nothing")
    database.execute(
        "CREATE TABLE late (id int PRIMARY KEY)",
        "INSERT INTO late VALUES (1)",
        f"ALTER PUBLICATION {PUBLICATION} ADD TABLE late",
    )
    table = f"{STREAM}.public.late"

    def copied():
        house.run_once()
        return table in pipeline.head().copies

    wait_for(copied, 60, "the copy, which no epoch shows yet")
    assert repository._state.consumers[name].version == held_at
    # Neither a renewal nor another epoch lets it go.
    house._lease(house._writer.head)
    assert repository._state.consumers[name].version == held_at
    pipeline.wait_for_tables("late")
    assert name not in repository._state.consumers
    assert_equal(database.dsn, pipeline.flush())


def test_31_a_driver_paused_before_it_cleans_up_destroys_nothing_newer(
    pipeline, database, monkeypatch
):
    """It has read the links, and lists the files when another one has taken over, copied a table and begun an epoch."""
    monkeypatch.setattr("spark_consumers.lake.tables.publication_poller.POLL_SECONDS", 0.0)
    chain = open_chain(pipeline.lake)
    left = pipeline.lake / "tables" / STREAM / "public" / "docs%t1-0a" / "data"
    left.mkdir(parents=True)
    users = pipeline.lake / "tables" / STREAM / "public" / "my own" / "metadata"
    users.mkdir(parents=True)
    older, newer = pipeline.lakehouse(), pipeline.lakehouse()
    table = f"{STREAM}.public.late"
    do = LakeSite.do
    staged = pipeline.lake / "_tuskline" / "staging" / f"{9:020d}-t3-a1" / "part"
    been: list[object] = []

    def paused(self, effect):
        if isinstance(effect, takeover.ListLeftovers) and not been:
            been.append(effect)
            newer.run_once()
            assert newer._writer.head.term == 3
            database.execute(
                "CREATE TABLE late (id int PRIMARY KEY)",
                "INSERT INTO late VALUES (1)",
                f"ALTER PUBLICATION {PUBLICATION} ADD TABLE late",
                "UPDATE docs SET title = 'newer'",
            )
            pipeline.wait_for_tables("late", house=newer)
            staged.parent.mkdir(parents=True)
            staged.write_bytes(b"of its next epoch")
        return do(self, effect)

    monkeypatch.setattr(LakeSite, "do", paused)
    with pytest.raises(FencedError):
        pipeline.flush(older)
    assert been
    assert staged.exists()
    assert users.exists()
    assert not left.exists()
    database.execute("INSERT INTO late VALUES (2)")
    assert_equal(database.dsn, pipeline.flush(newer))
    assert {m.term for m in chain.links() if table in m.tables} == {3}


def _overtaken_at(kind, newer, monkeypatch):
    """The first takeover pauses at its first effect of this kind, and the newer driver takes over; the effect is kept."""
    do = LakeSite.do
    been: list[object] = []

    def paused(self, effect):
        if isinstance(effect, kind) and not been:
            been.append(effect)
            newer.run_once()
        return do(self, effect)

    monkeypatch.setattr(LakeSite, "do", paused)
    return been


def test_35_a_takeover_that_was_overtaken_gives_way(pipeline, database, monkeypatch):
    older, newer = pipeline.lakehouse(), pipeline.lakehouse()
    been = _overtaken_at(takeover.TakeTable, newer, monkeypatch)
    with pytest.raises(FencedError, match="may no longer write this table"):
        older.run_once()
    assert (been[0].term, pipeline.head().term) == (2, 3)
    # Under supervision it waits from then on, for as long as the newer one is at work.
    assert older._standby.stands_by()
    assert older._standby.waits_for == newer._presence.name
    assert_equal(database.dsn, pipeline.flush(newer))


@pytest.mark.iceberg_only("reads no table")
def test_35_a_takeover_that_lost_its_link_to_another_gives_way(pipeline, monkeypatch):
    older, newer = pipeline.lakehouse(), pipeline.lakehouse()
    been = _overtaken_at(takeover.Publish, newer, monkeypatch)
    with pytest.raises(FencedError, match="has taken over, under term 2"):
        older.run_once()
    assert been[0].link.term == pipeline.head().term == 2


@pytest.mark.iceberg_only("reads no table")
def test_35_two_drivers_under_supervision_settle_on_one(pipeline, database, monkeypatch):
    monkeypatch.setattr("spark_consumers.lake.writer.pipeline._STANDBY", 0.05)
    looks: dict[str, int] = {}
    look = Standby.stands_by

    def counted(self):
        looks[self._presence.name] = looks.get(self._presence.name, 0) + 1
        return look(self)

    monkeypatch.setattr(Standby, "stands_by", counted)
    pipeline.house.close()

    def supervised(stop):
        while not stop.is_set():
            house = pipeline.lakehouse()
            with contextlib.suppress(FencedError):
                house.run(stop)

    stops = [threading.Event(), threading.Event()]
    threads = [threading.Thread(target=supervised, args=(stop,)) for stop in stops]
    try:
        threads[0].start()
        wait_for(lambda: pipeline.head().term == 2, 60, "the first driver")
        threads[1].start()
        wait_for(lambda: len(looks) == 2 and max(looks.values()) > 50, 60, "the second one looks")
        assert pipeline.head().term == 2
        # An orderly end: nobody waits for a lease to pass.
        stops[0].set()
        threads[0].join()
        wait_for(lambda: pipeline.head().term == 3, 10, "the second driver")
    finally:
        for stop in stops:
            stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    assert list((pipeline.lake / "_tuskline" / "drivers").iterdir()) == []


@pytest.mark.iceberg_only("reads no table")
def test_35_a_driver_that_died_is_not_waited_for(tmp_path):
    code = (
        "import sys, time; from pathlib import Path;"
        "from spark_consumers.lake.store.local_store import LocalStore;"
        "from spark_consumers.lake.writer.presence import Presence;"
        "Presence(LocalStore(Path(sys.argv[1]))).claim(7); print('there', flush=True); time.sleep(600)"
    )
    (tmp_path / "_tuskline").mkdir()
    other = Presence(LocalStore(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
    ) as driver:
        try:
            assert driver.stdout is not None
            driver.stdout.readline()
            (sign,) = other.others().values()
            assert (sign.term, sign.is_dead) == (7, False)

            def beats():
                (now,) = other.others().values()
                return now.beat != sign.beat

            wait_for(beats, 30, "a beat")
        finally:
            driver.kill()
    (sign,) = other.others().values()
    assert (sign.term, sign.is_dead) == (7, True)
    assert other.others() == {}


@pytest.mark.long
def test_a_resync_is_shown_in_few_epochs_however_long_the_backlog(pipeline, database):
    docs = f"{STREAM}.public.docs"
    house = pipeline.lakehouse(max_bytes_per_epoch=1024)
    pipeline.flush(house)
    house._began_at = time.monotonic()
    with LogClient(pipeline.log.address) as log:
        for _ in range(14):
            _commit_alone(database, log)
    requests.ask(open_chain(pipeline.lake), "resync", [docs])

    def copied():
        assert house.run_once() is None, "the interval is an hour"
        return docs in pipeline.head().copies

    wait_for(copied, 60, "the copy")
    house._began_at, epochs = float("-inf"), 0
    while pipeline.head().tables[docs].resync:
        epochs += house.run_once() is not None
    assert epochs <= 7
    assert_equal(database.dsn, pipeline.flush(house))
