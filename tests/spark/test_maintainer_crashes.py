"""Maintainers and the driver are killed at every step of a compaction, under load: real processes, SIGKILL and SIGSTOP."""

import contextlib
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from spark_consumers import Source, read
from spark_consumers.lake.compaction.maintainers import MAINTAINERS
from spark_consumers.lake.compaction.offer import OFFERS
from spark_consumers.lake.flush import flush
from spark_consumers.lake.manifest.chain import open_chain
from tests.support.bank_load import TABLES, check, transfer
from tests.support.child import start_tuskline
from tests.support.engines import metadata_of
from tests.support.iceberg_check import assert_valid
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.stack import Stack
from tests.support.waiting import wait_for
from walsender_bridge.config import load_config
from walsender_bridge.errors import Cause
from walsender_bridge.runtime import pid_file

#: Of the maintainer, then of the driver.
OWN = ("compaction-written", "compaction-prepared", "compaction-offered")
DRIVERS = ("compaction-committed", "compaction-published")
LAKE = """retention = 1.0
[lake.maintenance]
interval = 0.2
file_bytes = 1048576
"""


def maintain(stack, env=None):
    arguments = ["lake", "maintain", "--config", str(stack.config)]
    return start_tuskline(arguments, log=stack.directory / "maintain.log", env=env)


def accepted(stack):
    """Offers that the driver accepted since this maintainer began."""
    found = json.loads(stack.cli("status", "--json").stdout)["lake"]["maintenance"]
    return 0 if found is None else found["accepted"]


def link_of(stack):
    head = open_chain(stack.lake).head()
    assert head is not None
    return head.link


def goes_on(stack, links):
    """Wait for so many more links."""
    until = link_of(stack) + links
    wait_for(lambda: link_of(stack) >= until, 240, f"link {until}")


def shown(stack):
    head = open_chain(stack.lake).head()
    return head is not None and len(head.readable) == 3


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "places", [DRIVERS[1:], pytest.param(DRIVERS, marks=pytest.mark.long)], ids=["some", "all"]
)
def test_a_compaction_killed_anywhere_changes_no_row_and_leaves_no_file(
    tmp_path, database, spark, seed, places
):
    database.execute(*TABLES)
    stop = threading.Event()
    with Stack(tmp_path, {"shop": database.dsn}, epoch_interval=0.5, lake=LAKE) as stack:
        stack.start("log-server", "bridge", "lake")
        wait_for(lambda: shown(stack), 120, "the first epoch")
        load = threading.Thread(target=transfer, args=(database.dsn, stop, seed, 0.05))
        load.start()
        try:
            for place in OWN:
                dying = maintain(stack, {"TUSKLINE_FAIL_POINT": place})
                assert dying.wait(120) == -signal.SIGKILL
            # One that is suspended keeps no epoch from being published, and no other one of this machine starts.
            suspended = maintain(stack)
            names = open_chain(stack.lake).store
            run_dir = load_config(stack.config).run_dir
            wait_for(lambda: pid_file.owner(run_dir, "maintain"), 60, "a maintainer")
            os.kill(suspended.pid, signal.SIGSTOP)
            second = maintain(stack)
            assert second.wait(60) == Cause.RUNNING
            goes_on(stack, 3)
            os.kill(suspended.pid, signal.SIGCONT)
            for place in places:
                stack.kill("lake")
                stack.start("lake", env={"TUSKLINE_FAIL_POINT": place})
                assert stack.wait("lake", 240) == -signal.SIGKILL
                check(read(spark, stack.lake))
                stack.start("lake")
                goes_on(stack, 1)
            before = accepted(stack)
            wait_for(lambda: accepted(stack) > before, 120, "an accepted offer")
        finally:
            stop.set()
            load.join()
        suspended.terminate()
        assert suspended.wait(60) == 0
        sources = [Source("shop", database.dsn, "tuskline_shop")]
        flush(stack.lake, stack.log_address, sources, timeout=240)
        found = stack.cli("lake", "maintain", "--once", "--json")
        assert found.returncode == 0, found.stderr
        assert json.loads(found.stdout)["refused"] == 0

        def is_clean():
            flush(stack.lake, stack.log_address, sources, timeout=240)
            with contextlib.suppress(AssertionError, OSError):
                assert_no_orphans(spark, stack.lake)
                return names.names(OFFERS) == [] == names.names(MAINTAINERS)
            return False

        # One table is swept with each housekeeping.
        wait_for(is_clean, 120, "what was left to go")
        assert stack.stop("lake") == 0
        assert_equal(database.dsn, read(spark, stack.lake))
        assert_no_orphans(spark, stack.lake)
        for metadata in metadata_of(Path(stack.lake)).values():
            assert_valid(metadata)
