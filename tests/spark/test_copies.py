"""Copies of tables that are interrupted: an executor dies, the driver dies; what is whole is copied once."""

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

import pyspark
import pytest

from spark_consumers import Source, read
from spark_consumers.lake.flush import flush
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.status import read_status
from tests.support import bank_load
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.stack import Stack
from tests.support.suspended import suspend
from tests.support.waiting import wait_for
from walsender_bridge.runtime import processes

#: A local cluster's executors work here, whatever else is set.
WORK = Path(pyspark.__path__[0]) / "work"
EXECUTOR = "CoarseGrainedExecutorBackend"
BIG = "shop.public.big"
#: Each partition is a part of the copy, whatever its size.
PARTITIONED = (
    "CREATE TABLE big (id int PRIMARY KEY, body text) PARTITION BY HASH (id)",
    *(
        f"CREATE TABLE big_{n} PARTITION OF big FOR VALUES WITH (MODULUS 12, REMAINDER {n})"
        for n in range(12)
    ),
    "INSERT INTO big SELECT g, repeat(md5(g::text), 10) FROM generate_series(1, 24000) g",
)


def head(stack):
    return open_chain(stack.lake).head()


def copying(stack):
    """How far the copy of `big` is, as anybody can see it."""
    found = read_status(open_chain(stack.lake)).copying.get(BIG)
    return 0 if found is None else found.pieces_done


def log_lines(stack, words):
    text = (stack.directory / "lake.log").read_text(errors="replace")
    return [line for line in text.splitlines() if all(word in line for word in words)]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_21_a_driver_killed_in_the_middle_copies_only_what_is_not_whole(
    tmp_path, database, spark, seed
):
    database.execute(*bank_load.TABLES, *PARTITIONED)
    with (
        Stack(tmp_path, {"shop": database.dsn}, epoch_interval=0.5) as stack,
        bank_load.load(database.dsn, seed),
    ):
        stack.start("log-server", "bridge")
        # As soon as the first whole table is in the chain, in front of everything else.
        stack.start("lake", env={"TUSKLINE_FAIL_POINT": "copy-kept"})
        assert stack.wait("lake", 120) == -signal.SIGKILL
        kept = dict(head(stack).copies)
        assert kept
        # And in the middle of the large one, which would take half a minute.
        stack.start("lake", env={"TUSKLINE_LAKE__COPY_RATE": "400000"})
        wait_for(lambda: copying(stack) >= 2, 120, "parts of the large table")
        shown = stack.cli("table", "list", "--json")
        (row,) = [
            row
            for row in json.loads(shown.stdout.splitlines()[-1])["tables"]
            if row["table"] == BIG
        ]
        assert (row["state"], row["copy"]["pieces"]) == ("copying", 12)
        assert row["copy"]["rows"] > 0
        assert 0 < row["copy"]["bytes_per_second"] < 1_000_000
        # The others go on meanwhile.
        link = head(stack).link
        wait_for(lambda: head(stack).link >= link + 2, 60, "epochs go on")
        stack.kill("lake")
        assert BIG not in {**head(stack).tables, **head(stack).copies}
        stack.start("lake")
        wait_for(lambda: len(head(stack).tables) >= 4, 120, "all tables")
    # The block has ended the parts; the copies are counted over all three drivers.
    for name, table in kept.items():
        assert head(stack).tables[name].path == table.path
        assert len(log_lines(stack, ["table copied", f"table={name}"])) == 1
    assert len(log_lines(stack, ["table copied", f"table={BIG}"])) == 1


def executors(pid):
    """The executors' JVMs below a process."""
    return [each for each in processes.family(pid) if EXECUTOR in processes.command_line(each)]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_21_an_executor_killed_in_the_middle_costs_its_part_alone(tmp_path, database, spark):
    database.execute(*PARTITIONED)
    before = set(WORK.glob("*"))
    settings = 'spark_master = "local-cluster[2,1,1024]"\ncopy_rate = 1000000\n'
    try:
        with Stack(tmp_path, {"shop": database.dsn}, epoch_interval=0.5, lake=settings) as stack:
            stack.start("log-server", "bridge", "lake")
            wait_for(lambda: copying(stack) >= 2, 150, "parts of the table")
            victim, other = executors(stack.pid("lake"))
            # From here on it finishes nothing: what it has is in the middle when it is killed.
            suspend(victim)
            assert copying(stack) <= 9
            wait_for(lambda: copying(stack) == 11, 90, "all parts but the one that it has")
            os.kill(victim, signal.SIGKILL)
            wait_for(lambda: BIG in head(stack).tables, 90, "the table")
            assert other in executors(stack.pid("lake"))
            database.execute("UPDATE big SET body = 'after' WHERE id < 10")
            flush(
                stack.lake,
                stack.log_address,
                [Source("shop", database.dsn, "tuskline_shop")],
                timeout=90,
            )
            # That part alone was done again: no table was begun anew.
            assert len(log_lines(stack, ["table copied", BIG])) == 1
            assert stack.stop("lake") == 0
            assert_equal(database.dsn, read(spark, stack.lake))
            assert_no_orphans(spark, stack.lake)
    finally:
        for folder in set(WORK.glob("*")) - before:
            shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            WORK.rmdir()
