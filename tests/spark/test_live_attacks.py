"""Attacks on live reads: on what they read while they read it, and on what they leave behind."""

import base64
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading

import pytest

from spark_consumers import read
from spark_consumers.lake.epoch import plan
from spark_consumers.lake.live import log_tail
from spark_consumers.lake.live.log_lease import LogLease
from tests.spark.test_clusters import executors_of
from tests.support.capture_stack import PUBLICATION, STREAM
from tests.support.child import ROOT
from tests.support.lake_check import assert_equal
from tests.support.lake_pipeline import Pipeline
from tests.support.log_trim import trim
from tests.support.sizes import need_disk, scaled
from tests.support.spark_jvm import SHORT
from tests.support.spark_server import environment, standalone
from tests.support.waiting import wait_for
from walsender_bridge.errors import LakeError, TrimmedError

SECRET = "planted-5ecret-value"


def live(pipeline, spark=None):
    """A live read of everything that was committed before."""
    pipeline.barrier()
    return read(spark or pipeline.spark, pipeline.lake, live=True, log=pipeline.log.address)


def change(pipeline, *statements):
    """Run the statements, and then others that change nothing: each is a commit of the log, so that a small one is divided."""
    for statement in (*statements, *["UPDATE pairs SET a = a WHERE a = 1"] * 3):
        pipeline.database.execute(statement)
        pipeline.barrier()


@contextlib.contextmanager
def program(pipeline, folder, how="sent", env=None):
    """A program that has read live, until it is killed; what it says is in `said`."""
    events, said = folder / "events", folder / "said"
    events.mkdir()
    command = [sys.executable, "-m", "tests.support.live_job", str(pipeline.lake)]
    with said.open("wb") as output:
        process = subprocess.Popen(
            [*command, pipeline.log.address, str(events), how],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )

    def has_read():
        assert process.poll() is None, said.read_text()[-4000:]
        return "\nREAD " in said.read_text()

    try:
        wait_for(has_read, 240, "a live read")
        yield process
    finally:
        process.kill()
        process.wait()


def test_19_a_log_that_is_trimmed_beneath_a_live_read_is_a_named_error(
    pipeline, database, monkeypatch
):
    """A lease that lapsed: the log loses what the executors are about to read."""
    database.execute("UPDATE docs SET title = 'trimmed'")
    folded = log_tail._folded

    def trimmed(spark, work):
        trim(pipeline.log, STREAM)
        return folded(spark, work)

    monkeypatch.setattr(LogLease, "hold", lambda *_: 0)
    monkeypatch.setattr(log_tail, "_folded", trimmed)
    with pytest.raises(TrimmedError) as found:
        live(pipeline)
    assert found.value.where
    assert found.value.repair
    # And before it has planned what they read.
    with pytest.raises(TrimmedError, match="the log begins at"):
        read(pipeline.spark, pipeline.lake, live=True, log=pipeline.log.address)


def test_a_live_snapshot_stays_as_it_is_when_another_driver_takes_over(pipeline, database):
    database.execute("UPDATE docs SET title = 'before'", "DELETE FROM bag WHERE f = 'NaN'")
    before = live(pipeline)
    other = pipeline.lakehouse(retention_seconds=0.0)
    other.run_once(force=True)
    assert pipeline.head().term > before.manifest.term, "it is another writer"
    database.execute("UPDATE docs SET title = 'after'", "TRUNCATE bag, pairs")
    pipeline.flush(other)
    # Its epoch is past the retention, and expires as far as no reader needs it.
    other.run_once(force=True)
    assert {row.title for row in before["docs"].collect()} == {"before"}
    assert (before["bag"].count(), before["pairs"].count()) == (4, 2)
    assert_equal(database.dsn, live(pipeline), counted=False)


def test_2_two_sessions_of_one_program_do_not_go_back_and_have_their_own_views(pipeline, database):
    other = pipeline.spark.newSession()
    database.execute("UPDATE docs SET title = 'first'")
    first = live(pipeline)
    first.register_views("now")
    database.execute("UPDATE docs SET title = 'second'")
    second = live(pipeline, other)
    second.register_views("now")
    assert second.epoch >= first.epoch

    def titles(spark):
        return {row.title for row in spark.sql("SELECT title FROM now_public_docs").collect()}

    assert (titles(pipeline.spark), titles(other)) == ({"first"}, {"second"})
    # The program has read it: its other session does not read an older one.
    assert live(pipeline).epoch >= second.epoch
    assert pipeline.flush().epoch >= second.epoch


def test_3_live_reads_at_once_in_one_program_are_each_of_one_state(pipeline, database):
    """Four threads read live, and so share a lease on the log and one on the lake, while an epoch is published."""
    stop, wrong, read_by = threading.Event(), [], []

    def reads(spark):
        with contextlib.suppress(LakeError):
            while not stop.is_set():
                found = live(pipeline, spark)
                docs = {row.n for row in found["docs"].select("n").collect()}
                pairs = {row.a for row in found["pairs"].select("a").collect()}
                if len(docs) != 1 or docs != pairs:
                    wrong.append((found.epoch, docs, pairs))
                read_by.append(threading.get_ident())

    database.execute("UPDATE docs SET n = 0; DELETE FROM pairs; INSERT INTO pairs VALUES (0, 'x')")
    sessions = [pipeline.spark, pipeline.spark.newSession()] * 2
    threads = [threading.Thread(target=reads, args=(each,)) for each in sessions]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 13):
            database.execute(
                f"BEGIN; UPDATE docs SET n = {number}; UPDATE pairs SET a = {number}; COMMIT"
            )
            if number % 4 == 0:
                pipeline.house.run_once(force=True)
            known = len(read_by)
            wait_for(lambda: len(read_by) > known, 60, "a read")  # noqa: B023  # it is called at once
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)
    assert not wrong
    assert len(set(read_by)) == len(threads)


def test_a_live_read_of_more_than_a_hundred_ranges(pipeline, database, monkeypatch):
    """Each of its transactions is a range, and each key is changed in many of them."""
    monkeypatch.setattr(plan, "RANGE_BYTES", 1)
    ranges = []
    folded = log_tail._folded

    def counted(spark, work):
        ranges.append(len(work))
        return folded(spark, work)

    monkeypatch.setattr(log_tail, "_folded", counted)
    for number in range(120):
        database.execute(
            f"BEGIN; UPDATE docs SET title = title || '{number % 10}' WHERE id % 3 = {number % 3};"
            f" INSERT INTO bag VALUES ({number % 7}, 0, 'x', NULL); UPDATE pairs SET a = a + 1; COMMIT"
        )
        # Each is a commit of the log.
        pipeline.barrier()
    assert_equal(database.dsn, live(pipeline), counted=False)
    assert max(ranges) > 100


@pytest.mark.parametrize("how", ["sent", "executors", "stored"])
def test_no_value_of_a_row_is_in_sparks_event_log_or_on_the_screen(pipeline, tmp_path, how):
    """What the tail has travels in plans and tasks. `executors`, `stored`: as larger tails do."""
    change(
        pipeline,
        f"UPDATE docs SET title = '{SECRET}', body = '{SECRET}' WHERE id < 4",
        f"INSERT INTO bag VALUES (7, 0, '{SECRET}', NULL)",
    )
    with program(pipeline, tmp_path, how):
        assert bool([*pipeline.lake.glob("_tuskline/live/*")]) == (how == "stored")
        texts = [path.read_bytes() for path in (tmp_path / "events").rglob("*") if path.is_file()]
        texts.append((tmp_path / "said").read_bytes())
    assert sum(map(len, texts)) > 100_000
    assert any(b"SparkListenerSQLExecutionStart" in text for text in texts)
    # A part of any encoding of it begins at one of three places.
    encoded = [base64.b64encode(b" " * at + SECRET.encode())[4:20] for at in range(3)]
    for text in texts:
        assert SECRET.encode() not in text
        assert not [each for each in encoded if each in text]


def test_row_filters_column_lists_and_generated_columns_of_the_publication_hold(pipeline, database):
    publication = f"ALTER PUBLICATION {PUBLICATION} ADD TABLE"
    database.execute(
        "CREATE TABLE listed (id int PRIMARY KEY, note text, secret text, twice int GENERATED ALWAYS AS (id * 2) STORED)",
        "CREATE TABLE doubled (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED, note text)",
        "INSERT INTO listed (id, note, secret) SELECT g, 'old', 's' FROM generate_series(1, 10) g",
        "INSERT INTO doubled (id, note) SELECT g, 'old' FROM generate_series(1, 3) g",
        f"{publication} listed (id, note) WHERE (id > 5)",
        f"{publication} doubled",
    )
    pipeline.wait_for_tables("listed", "doubled")
    for change in (
        "UPDATE listed SET note = 'new' WHERE id % 2 = 0",
        # Into what the filter lets through, and out of it.
        "UPDATE listed SET id = id + 100 WHERE id = 3; UPDATE listed SET id = -8 WHERE id = 8",
        "INSERT INTO listed (id, note, secret) VALUES (0, 'below', 's'), (20, 'above', 's')",
        "DELETE FROM listed WHERE id = 7; UPDATE doubled SET id = id + 10, note = 'moved' WHERE id > 1",
    ):
        database.execute(change)
        found = live(pipeline)
        with database.connect() as connection:
            listed = connection.execute("SELECT id, note FROM listed WHERE id > 5").fetchall()
            doubled = connection.execute("SELECT id, note FROM doubled").fetchall()
        assert sorted(map(tuple, found["listed"].collect())) == sorted(listed)
        assert sorted(map(tuple, found["doubled"].collect())) == sorted(doubled)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_transaction_of_half_a_gigabyte_behind_the_epoch(pipeline, database, tmp_path):
    """What the driver holds of it does not grow with it."""
    size = scaled(500)
    need_disk(tmp_path, 8 * size)
    rows = size * 100
    database.execute(
        f"BEGIN; INSERT INTO docs SELECT g, 't' || g, repeat(md5(g::text), 320), g, 0 FROM generate_series(100, {rows} + 99) g;"
        "UPDATE docs SET title = 'kept' WHERE id % 100 = 7;"
        "UPDATE docs SET id = -id WHERE id % 1000 = 1; DELETE FROM docs WHERE id % 10 = 5; COMMIT"
    )
    pipeline.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = live(pipeline)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    own = found["docs"].selectExpr("count(*)", "sum(id)", "sum(length(body))").first()
    with database.connect() as connection:
        expected = connection.execute(
            "SELECT count(*), sum(id), sum(length(body)) FROM docs"
        ).fetchone()
        texts = connection.execute(
            "SELECT id, title, md5(body) FROM docs WHERE id % 50 = 7"
        ).fetchall()
    assert tuple(own) == expected
    some = found["docs"].where("id % 50 = 7").selectExpr("id", "title", "md5(body)").collect()
    assert sorted(map(tuple, some)) == sorted(texts)
    print(f"{size} MB: the driver has grown by {grown:.0f} MB")
    assert grown < 150
    assert pipeline.head().epoch < found.epoch


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_3_a_live_read_of_three_hundred_tables(spark, tmp_path, database):
    names = [f"t{number}" for number in range(300)]
    for name in names:
        database.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, n int)")
    database.execute(
        *(f"INSERT INTO {name} SELECT g, 0 FROM generate_series(1, 9) g" for name in names)
    )
    with Pipeline(spark, tmp_path, database, [f"public.{name}" for name in names]) as pipeline:
        pipeline.wait_for_tables(*names)
        for number in (1, 2):
            changes = (f"UPDATE {name} SET n = {number} WHERE id % 2 = 0" for name in names)
            database.execute(f"BEGIN; {'; '.join(changes)}; COMMIT")
            found = live(pipeline)
            views = found.register_views("now")
            assert len(views) == len(found.tables) == len(names)
            sums = set()
            for first in range(0, len(names), 30):
                query = (
                    f"SELECT sum(n) AS s FROM {view}" for view in sorted(views)[first : first + 30]
                )
                sums |= {row.s for row in spark.sql(" UNION ALL ".join(query)).collect()}
            assert sums == {4 * number}


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["executors", "stored"])
def test_16_an_executor_killed_in_mid_query_of_a_live_read_costs_a_retry_alone(
    pipeline, database, tmp_path, how
):
    """On a standalone cluster with two executors: one that has read a part of the tail is lost, and so are its rows."""
    change(
        pipeline,
        "UPDATE docs SET title = 'live' || id WHERE id < 5",
        "INSERT INTO docs SELECT g, 'more', 'x', g, 0 FROM generate_series(100, 140) g",
    )
    place = tmp_path / "cluster"
    place.mkdir()
    env = environment()
    with standalone(place, env) as cluster:
        (place / "spark-defaults.conf").write_text(
            f"spark.master {cluster.master}\nspark.driver.bindAddress 127.0.0.1\n"
            "spark.driver.host 127.0.0.1\nspark.executor.cores 1\nspark.executor.memory 512m\n"
            f"spark.executor.defaultJavaOptions {SHORT} -XX:-UsePerfData -Djava.io.tmpdir={place}\n"
        )
        with program(pipeline, tmp_path, how, {**env, "SPARK_CONF_DIR": str(place)}):
            (tmp_path / "events" / "query").touch()
            wait_for(lambda: b"QUERYING" in (tmp_path / "said").read_bytes(), 60, "the query")
            victims = wait_for(lambda: executors_of(place), 60, "executors")
            assert len(victims) == 2
            os.kill(victims[0], signal.SIGKILL)

            def answer():
                said = (tmp_path / "said").read_text().splitlines()
                return [line for line in said if line.startswith("ANSWER ")]

            (line,) = wait_for(answer, 300, "the answer")
    with database.connect() as connection:
        expected = connection.execute("SELECT id, title FROM docs ORDER BY id").fetchall()
    assert json.loads(line.removeprefix("ANSWER ")) == [list(row) for row in expected]


def test_a_reader_that_is_killed_leaves_nothing_behind(pipeline, tmp_path):
    """Its files, its record in the lake, and its lease on the log, which ends by itself."""
    change(pipeline, "UPDATE docs SET title = 'stored'", "INSERT INTO bag SELECT * FROM bag")
    records = pipeline.lake / "_tuskline" / "readers"
    own = {path.name for path in records.glob("*")}
    house = pipeline.lakehouse(retention_seconds=0.0)

    def keeps_house():
        """Behind an epoch that is published."""
        change(pipeline)
        house.run_once(force=True)

    with program(pipeline, tmp_path, "stored"):
        folders = [*(pipeline.lake / "_tuskline" / "live").iterdir()]
        assert folders
        its = {path.name for path in records.iterdir()} - own
        keeps_house()
        assert all(folder.exists() for folder in folders), "it lives"
        assert its <= {path.name for path in records.iterdir()}
    keeps_house()
    assert not [folder for folder in folders if folder.exists()]
    assert its.isdisjoint(path.name for path in records.iterdir())
