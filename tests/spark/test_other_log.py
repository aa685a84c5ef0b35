"""The log's data is removed, and a new log answers: the lake goes on with it when asked, in its folder, under its names."""

import shutil
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from spark_consumers import read
from spark_consumers.lake.manifest.chain import Manifest, open_chain
from spark_consumers.lake.manifest.table_version import ANOTHER_LOG, PAUSED
from spark_consumers.lake.writer import adopt, requests
from tests.support.attached import Attached
from tests.support.capture_stack import SLOT, STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.servers import Database
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.errors import Cause, LakeError, UnavailableError

#: Where the old log is when its data is removed: no epoch of the new one may have a smaller number.
VERSION = 5000


def drop_slot(dsn: str) -> None:
    """As `pg_drop_replication_slot`, once nobody streams from it."""

    def dropped() -> bool:
        with psycopg.connect(dsn, autocommit=True) as connection:
            try:
                connection.execute("SELECT pg_drop_replication_slot(%s)", [SLOT])
            except psycopg.errors.ObjectInUse:
                return False
            return True

    wait_for(dropped, 60, "the slot is dropped")


def identity(address: str) -> str:
    with LogClient(address) as log:
        return log.status().log_id


def head(lake: Path) -> Manifest:
    found = open_chain(lake).head()
    assert found is not None
    return found


def rows(spark, lake, **which) -> dict[str, set[int]]:
    """Keys by table."""
    snapshot = read(spark, lake, **which)
    return {name: {row[0] for row in snapshot[name].collect()} for name in ("orders", "items")}


def remove_log(tuskline: Attached) -> None:
    """As docs/log-lost.md says it."""
    old = tuskline.directory / "old"
    old.mkdir()
    log, log_server = tuskline.directory / "log", tuskline.directory / "log-server"
    for path in [
        *log.glob("repository.sqlite*"),
        log_server / "log-server.json",
        log_server / "streams",
    ]:
        path.rename(old / path.name)


def carried_out(pipeline, request):
    """What became of the request, with rounds until then."""

    def done():
        pipeline.house.run_once(force=True)
        return requests.finished(pipeline.head(), request)

    return wait_for(done, 120, f"the request to {request.kind}")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_lake_goes_on_with_a_log_that_was_made_anew(tmp_path, database, spark):
    database.execute(
        "CREATE TABLE orders (id int PRIMARY KEY)",
        "CREATE TABLE items (id int PRIMARY KEY)",
        "INSERT INTO orders SELECT generate_series(1, 9)",
        "INSERT INTO items SELECT generate_series(1, 9)",
    )
    source = {"dsn": database.dsn, "tables": ["public.orders", "public.items"]}
    with Attached(tmp_path, {STREAM: source}, lake=True) as tuskline:
        address = f"grpc://{tuskline.log_listen}"
        tuskline.json("init")
        tuskline.up()
        assert tuskline.run("flush", seconds=240).returncode == 0, tuskline.logs()
        paused = tuskline.run("table", "pause", f"{STREAM}.public.items", "--wait", seconds=120)
        assert paused.returncode == 0, paused.stderr
        with LogClient(address) as log:
            log.raise_version(VERSION)
        database.execute("INSERT INTO orders VALUES (10)", "INSERT INTO items VALUES (10)")
        assert tuskline.run("flush", seconds=120).returncode == 0, tuskline.logs()
        before = head(tuskline.lake)
        assert before.epoch > VERSION
        old = identity(address)
        assert tuskline.stop_up() == 0

        remove_log(tuskline)
        drop_slot(database.dsn)
        database.execute(
            "DELETE FROM orders WHERE id < 4",
            "INSERT INTO orders VALUES (11)",
            "INSERT INTO items VALUES (11)",
        )
        tuskline.json("init")
        # It dies when the new log has skipped the versions, and nothing else is done.
        tuskline.up(env={"TUSKLINE_FAIL_POINT": "versions-skipped"})

        def named() -> bool:
            done = tuskline.run("status")
            text = " ".join(done.stderr.split())
            return f"this lake belongs to {old}" in text and "tuskline reattach" in text

        wait_for(named, 180, "the cause in `status`\n" + tuskline.logs())
        new = identity(address)
        flushed = tuskline.run("flush")
        assert flushed.returncode == Cause.LAKE, flushed.stderr
        assert f"the log is {new}, but this lake belongs to {old}" in flushed.stderr
        assert head(tuskline.lake) == before
        looked = " ".join(tuskline.run("doctor").stdout.split())
        assert f"this lake belongs to {old}" in looked

        asked = adopt.request(open_chain(tuskline.lake), new)
        assert asked is not None
        adopt.request(open_chain(tuskline.lake), new)
        # Waits for what the lake is asked for, too.
        flushed = tuskline.run("flush", seconds=240)
        assert flushed.returncode == 0, flushed.stderr + tuskline.logs()
        told = requests.wait(open_chain(tuskline.lake), asked, timeout=60)
        assert told == {f"{STREAM}.public.orders": f"is brought level or copied: {ANOTHER_LOG}"}
        assert "signal=SIGKILL" in tuskline.output.read_text()
        after = head(tuskline.lake)
        assert after.epoch > before.epoch
        assert set(after.tables) == set(before.tables)
        assert after.lake == before.lake
        assert adopt.request(open_chain(tuskline.lake), new) is None
        assert not list(requests.waiting(open_chain(tuskline.lake)))
        # The paused table has the rows that it had, and is copied when it is resumed.
        assert after.tables[f"{STREAM}.public.items"].state == PAUSED
        assert rows(spark, tuskline.lake) == {
            "orders": {*range(4, 12)},
            "items": {*range(1, 10)},
        }
        resumed = tuskline.run("table", "resume", f"{STREAM}.public.items", "--wait", seconds=180)
        assert resumed.returncode == 0, resumed.stderr
        database.execute("INSERT INTO orders VALUES (12)", "DELETE FROM items WHERE id = 1")
        assert tuskline.run("flush", seconds=120).returncode == 0, tuskline.logs()
        assert_equal(database.dsn, read(spark, tuskline.lake))
        # What was read before can be read as it was.
        assert rows(spark, tuskline.lake, epoch=before.epoch) == {
            "orders": {*range(1, 11)},
            "items": {*range(1, 10)},
        }
        assert tuskline.stop_up() == 0


@pytest.mark.long
def test_a_driver_under_which_the_log_is_replaced_takes_the_new_one_on(pipeline):
    database: Database = pipeline.database
    database.execute("INSERT INTO bag SELECT g FROM generate_series(100, 120) g")
    before = pipeline.flush().manifest
    house, chain = pipeline.house, open_chain(pipeline.lake)
    requests.ask(chain, requests.PAUSE, [f"{STREAM}.public.pairs"])
    house.run_once(force=True)

    pipeline.capture.kill()
    pipeline.log.stop_repository()
    pipeline.log.kill_log_server()
    for part in ("log-server", "repository"):
        shutil.rmtree(pipeline.folder / part)
    drop_slot(database.dsn)
    database.execute("UPDATE docs SET n = n + 1", "DELETE FROM bag WHERE a > 110")
    pipeline.log.start_log_server()
    pipeline.log.start_repository()
    pipeline.capture.start()
    wait_for(pipeline.capture.streams, 60, "capture streams")
    new = identity(pipeline.log.address)

    head_then = pipeline.head()
    adopt.request(open_chain(pipeline.lake), "a third one")
    for _ in range(2):
        with pytest.raises(LakeError, match=r"a request to continue with a third one is pending"):
            house.run_once(force=True)
    assert pipeline.head() == head_then
    asked = adopt.request(open_chain(pipeline.lake), new)
    house.run_once(force=True)
    assert pipeline.head() == head_then
    done = carried_out(pipeline, asked)
    assert set(done) == {f"{STREAM}.public.docs", f"{STREAM}.public.bag"}
    assert pipeline.head().log_id == new
    assert list(requests.waiting(chain)) == []
    database.execute("INSERT INTO bag VALUES (7)")
    carried_out(pipeline, requests.ask(chain, requests.RESUME, [f"{STREAM}.public.pairs"]))
    after = pipeline.flush()
    assert after.epoch > before.epoch
    assert_equal(database.dsn, after)
    assert_no_orphans(pipeline.spark, pipeline.lake)
    # Its lease is at the new log.
    consumers = pipeline.log.repository._state.consumers
    assert consumers[f"lake-{after.manifest.lake}"].version == after.epoch


def test_an_epoch_that_was_read_while_the_log_was_replaced_is_not_published(pipeline, monkeypatch):
    pipeline.database.execute("INSERT INTO bag VALUES (7)")
    pipeline.barrier()
    before, client = pipeline.head(), pipeline.house._log.client
    answers = [client.status(), replace(client.status(), log_id="another")]
    with monkeypatch.context() as patched:
        patched.setattr(client, "status", lambda: answers.pop(0))
        with pytest.raises(UnavailableError, match="the log is another"):
            pipeline.house.run_once(force=True)
    assert pipeline.head() == before
    assert_equal(pipeline.database.dsn, pipeline.flush())
