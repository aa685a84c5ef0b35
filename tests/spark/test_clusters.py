"""A lake's driver on clusters: executors are other processes, which may die in the middle of what they write."""

import contextlib
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import pyspark
import pytest

import tests
from spark_consumers import Source, read
from spark_consumers.lake.flush import flush
from spark_consumers.lake.format.data_files import Stage
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.status import read_status
from tests.support import probe
from tests.support.child import run_tuskline
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.spark_jvm import SHORT, in_pysparks_home, work_removed
from tests.support.spark_server import environment, job_descriptions, process, standalone
from tests.support.stack import Stack
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.runtime import processes

SUBMIT = Path(tests.__path__[0]).parent / "docs" / "examples" / "submit.py"
PACKAGE = Path(pyspark.__path__[0])
#: A Python of the driver's minor version without the project, as an executor's may be.
SYSTEM_PYTHON = f"/usr/bin/python3.{sys.version_info.minor}"
EXECUTOR = "CoarseGrainedExecutorBackend"
TABLES = (
    "CREATE TABLE orders (id int PRIMARY KEY, note text)",
    "CREATE TABLE lines (id int PRIMARY KEY, order_id int, amount numeric(9,2))",
    "CREATE TABLE events (at int, what text)",
    "ALTER TABLE events REPLICA IDENTITY FULL",
    "INSERT INTO orders SELECT g, 'before' FROM generate_series(1, 100) g",
    "INSERT INTO lines SELECT g, g % 100, g FROM generate_series(1, 300) g",
    "INSERT INTO events SELECT g, 'before' FROM generate_series(1, 50) g",
)
#: One transaction in all tables: an epoch has all of it or none.
CHANGES = (
    "BEGIN; UPDATE orders SET note = 'after' WHERE id % 3 = 0; "
    "DELETE FROM lines WHERE id % 5 = 0; INSERT INTO lines VALUES (1000, 1, 0.5); "
    "UPDATE events SET what = 'after' WHERE at < 9; COMMIT"
)
NAMES = [f"shop.public.{name}" for name in ("events", "lines", "orders")]


def executor_of(line):
    """The executor's JVM above a process; None if there is none."""
    return next((pid for pid, command in line["ancestors"] if EXECUTOR in command), None)


@contextlib.contextmanager
def cluster_of(kind, folder, env):
    """A cluster with two executors; its master's address, and the settings that its executors were given."""
    if kind == "standalone":
        with standalone(folder, env) as cluster:

            def given():
                (app,) = cluster.state()["activeapps"]
                return app["name"], app["memoryperexecutor"], app["cores"]

            yield cluster.master, given
    else:
        with work_removed():
            yield "local-cluster[2,1,1024]", None


@contextlib.contextmanager
def driver_of(kind, stack, env, master):
    """The lake's driver, until it has ended in order: by itself, or under spark-submit; the function of its pid."""
    if kind == "standalone":
        stack.start("lake", env=env)
        yield lambda: stack.pid("lake")
        assert stack.stop("lake") == 0
        return
    command = [
        *(f"{env['SPARK_HOME']}/bin/spark-submit", "--master", master, str(SUBMIT)),
        *("lake", "run", "--config", str(stack.config)),
    ]
    with process(command, env, stack.directory / "lake.log") as job:

        def pid():
            found = processes.family(job.pid)
            (python,) = (
                p for p in found if f"{SUBMIT} lake run" in processes.command_line(p)[:400]
            )
            return python

        yield pid
        os.kill(pid(), signal.SIGTERM)
        assert job.wait(60) == 0


def assert_by_executors(told, known, victim, driver):
    """All was decoded and written by executors; what the `victim` had begun after `known` lines, again by another one."""
    # A worker may outlive its executor, and is nobody's child then.
    workers = {line["pid"] for line in told if executor_of(line)}
    assert {line["pid"] for line in told} == workers
    assert driver not in workers
    again = [line for line in told[known:] if "half" in line]
    assert {executor_of(line) for line in again} - {victim, None}


def assert_whole_epochs(spark, lake, first):
    """From epoch `first` on, the transaction is in all tables or in none, and stays."""
    epochs = sorted({link.epoch for link in open_chain(lake).links()})
    shown = []
    for epoch in epochs[epochs.index(first) :]:
        seen = read(spark, lake, epoch=epoch)
        notes = seen["orders"].where("note = 'after'").select("id")
        shown.append(notes.unionAll(seen["lines"].where("id = 1000").select("id")).count())
    assert set(shown) == {0, 34}
    assert shown == sorted(shown)


def assert_jobs_are_named(jobs):
    """Spark's UI says of each job what it does, for which tables."""
    assert f"tuskline: copy of lake lake: {NAMES[0]}, read and write, part 1 of 1" in jobs
    end = f" of lake lake: {', '.join(NAMES)}, fold and write"
    assert any(job.startswith("tuskline: epoch ") and job.endswith(end) for job in jobs), jobs
    assert all(job.startswith("tuskline: ") for job in jobs), jobs


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind", ["standalone", pytest.param("local-cluster", marks=pytest.mark.long)]
)
def test_an_executor_killed_in_mid_write_costs_a_retry_alone(tmp_path, database, spark, kind):
    database.execute(*TABLES)
    place, report = tmp_path / "cluster", tmp_path / "probe.jsonl"
    place.mkdir()
    go, half, whole = (Path(f"{report}.{name}") for name in ("go", "half", "whole"))
    go.touch()

    def lines():
        # A reader may find the file in the middle of an append: what follows the last newline is no line.
        text = report.read_text().rpartition("\n")[0] if report.exists() else ""
        return [json.loads(line) for line in text.splitlines()]

    env = {
        **environment(Path(probe.__path__[0])),
        "SPARK_CONF_DIR": str(place),
        "TUSKLINE_TEST_PROBE": str(report),
    }
    page = free_port()
    with cluster_of(kind, place, env) as (master, given):
        options = f"{SHORT} -XX:-UsePerfData -Djava.io.tmpdir={place}"
        # The user's own settings, where Spark looks for them: the configuration of Tuskline names no master.
        (place / "spark-defaults.conf").write_text(
            f"spark.master {master}\n"
            "spark.app.name theirs\n"
            "spark.driver.bindAddress 127.0.0.1\n"
            "spark.driver.host=127.0.0.1\n"
            "spark.driver.memory 600m\n"
            "spark.executor.cores 1\n"
            "spark.executor.memory 512m\n"
            f"spark.executor.defaultJavaOptions {options}\n"
            "spark.log.level ERROR\n"
            "spark.ui.enabled true\n"
            f"spark.ui.port {page}\n"
        )
        with Stack(tmp_path, {"shop": database.dsn}, epoch_interval=0.3) as stack:
            stack.start("log-server", "bridge")

            def head():
                return open_chain(stack.lake).head()

            with driver_of(kind, stack, env, master) as pid:
                wait_for(lambda: (h := head()) and sorted(h.readable) == NAMES, 400, "all tables")
                if given is not None:
                    assert given() == ("theirs", 512, 2)
                before = head().epoch
                half.touch()
                database.execute(CHANGES)
                wait_for(lambda: [li for li in lines() if "half" in li], 200, "half of a file")
                written = [li for li in lines() if "half" in li][-1]
                victim, stage = executor_of(written), Stage.of(written["half"].removeprefix("."))
                assert victim is not None
                assert stage is not None
                os.kill(victim, signal.SIGKILL)
                known = len(lines())
                whole.touch()
                source = Source("shop", database.dsn, "tuskline_shop")
                flush(stack.lake, stack.log_address, [source], timeout=200)
                snap = read(spark, stack.lake)
                assert snap.tables == NAMES
                assert_equal(database.dsn, snap)
                # A retry of the task: the epoch is that of the driver's attempt that was interrupted.
                link = open_chain(stack.lake).at_link(stage.link)
                assert link is not None
                assert link.stage == str(stage)
                assert_by_executors(lines(), known, victim, pid())
                assert_whole_epochs(spark, stack.lake, before)
                assert_jobs_are_named(job_descriptions(f"127.0.0.1:{page}"))
            assert_no_orphans(spark, stack.lake)


def executors_of(folder):
    """The pids of the executors that run now and have their files there."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_text()
                if EXECUTOR in command and str(folder) in command:
                    found.append(int(entry.name))
    return sorted(found)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_executors_that_come_and_go_change_no_row(tmp_path, database, spark):
    """Dynamic allocation: a copy that is planned while one executor is there is made by two, and one dies in its middle."""
    database.execute(
        *TABLES,
        "CREATE TABLE large (id int PRIMARY KEY, note text)",
        "ALTER TABLE large ALTER note SET STORAGE PLAIN",
        "INSERT INTO large SELECT g, repeat(md5(g::text), 30) FROM generate_series(1, 24000) g",
    )
    place, report = tmp_path / "cluster", tmp_path / "probe.jsonl"
    place.mkdir()
    for name in ("go", "slow"):
        Path(f"{report}.{name}").touch()
    env = {
        **environment(Path(probe.__path__[0])),
        "SPARK_CONF_DIR": str(place),
        "TUSKLINE_TEST_PROBE": str(report),
    }

    def parts():
        """How many parts of the copy each executor has begun."""
        text = report.read_text().rpartition("\n")[0] if report.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        return Counter(executor_of(line) for line in lines if "part" in line)

    with standalone(place, env) as cluster:
        (place / "spark-defaults.conf").write_text(
            f"spark.master {cluster.master}\n"
            "spark.driver.bindAddress 127.0.0.1\n"
            "spark.driver.host 127.0.0.1\n"
            "spark.driver.memory 600m\n"
            "spark.executor.cores 1\n"
            "spark.executor.memory 512m\n"
            f"spark.executor.defaultJavaOptions {SHORT} -XX:-UsePerfData -Djava.io.tmpdir={place}\n"
            "spark.dynamicAllocation.enabled true\n"
            "spark.dynamicAllocation.shuffleTracking.enabled true\n"
            "spark.dynamicAllocation.initialExecutors 1\n"
            "spark.dynamicAllocation.maxExecutors 2\n"
            "spark.dynamicAllocation.executorIdleTimeout 4s\n"
            "spark.log.level ERROR\n"
        )
        # Of that follows how large a part of a table is, about 1 MB; and each takes two seconds.
        small = "copy_rate = 2000000.0\n"
        with Stack(tmp_path, {"shop": database.dsn}, epoch_interval=0.3, lake=small) as stack:
            stack.start("log-server", "bridge")
            stack.start("lake", env=env)

            def head():
                return open_chain(stack.lake).head()

            def copying():
                found = read_status(open_chain(stack.lake)).copying.get("shop.public.large")
                return found is not None and found.pieces_done > 1 and found

            begun = wait_for(copying, 400, "parts of the large table")
            # Known before any other executor has come.
            assert begun.pieces >= 10
            wait_for(lambda: len(parts()) == 2, 100, "parts by two executors")
            names = sorted([*NAMES, "shop.public.large"])
            assert "shop.public.large" not in head().readable
            first, second = parts()
            os.kill(first, signal.SIGKILL)
            wait_for(lambda: parts().keys() - {first, second}, 100, "parts by a third one")
            wait_for(lambda: (h := head()) and sorted(h.readable) == names, 400, "all tables")
            before = head().epoch
            # Without work they go, and come again for the next epoch; the first that comes dies in its middle.
            wait_for(lambda: executors_of(place) == [], 200, "no executor")
            database.execute(CHANGES, "UPDATE large SET note = repeat('y', 500) WHERE id % 2 = 0")
            (another, *_) = wait_for(lambda: executors_of(place), 200, "an executor")
            os.kill(another, signal.SIGKILL)
            source = Source("shop", database.dsn, "tuskline_shop")
            flush(stack.lake, stack.log_address, [source], timeout=300)
            snap = read(spark, stack.lake)
            assert snap.tables == names
            assert_equal(database.dsn, snap)
            assert_whole_epochs(spark, stack.lake, before)
            assert stack.stop("lake") == 0
        assert_no_orphans(spark, stack.lake)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("python", "expected"),
    [
        ("", []),
        (SYSTEM_PYTHON, ["the package tuskline is not installed"]),
        ("/nowhere/python", ["executors cannot run a task of Python"]),
    ],
)
def test_the_doctor_names_what_executors_lack(tmp_path, database, python, expected):
    """The driver has Tuskline; the executors have it if they are given the driver's Python."""
    place = tmp_path / "cluster"
    place.mkdir()
    # The test's own Spark home has no archive of PySpark, which a Python without it needs.
    env = {**in_pysparks_home(environment()), "SPARK_HOME": str(PACKAGE)}
    executors = {key: value for key, value in env.items() if key != "PYTHONPATH"}
    with standalone(place, executors) as cluster:
        (place / "spark-defaults.conf").write_text(
            f"spark.master {cluster.master}\nspark.driver.host 127.0.0.1\n"
            f"spark.driver.memory 600m\nspark.executor.memory 512m\nspark.log.level OFF\n"
            + (f"spark.pyspark.python {python}\n" if python else "")
        )
        with Stack(tmp_path, {"shop": database.dsn}) as stack:
            told = ["doctor", "--json", "--config", str(stack.config)]
            done = run_tuskline(told, env={**env, "SPARK_CONF_DIR": str(place)}, seconds=300)
    found = json.loads(done.stdout.splitlines()[-1])["findings"]
    seen = [each for each in found if each["check"] == "executors"]
    assert seen, done.stdout + done.stderr
    errors = [each["what"] for each in seen if each["severity"] == "error"]
    if expected:
        assert expected[0] in errors[0], errors
        assert all(each["repair"] for each in seen)
    else:
        assert not errors
