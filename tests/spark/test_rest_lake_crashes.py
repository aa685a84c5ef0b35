"""The driver of a lake in a REST catalog is killed at every stage, and suspended: real processes, SIGKILL and SIGSTOP."""

import copy
import os
import signal
import threading
from contextlib import ExitStack, contextmanager, suppress

import pytest

from spark_consumers import Lakehouse, Source, read
from spark_consumers.lake.flush import flush
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.spark.lake_catalog import LakeCatalog
from tests.support.bank_load import TABLES, check, transfer
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.rest_catalog import RestServer
from tests.support.stack import Stack
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause

NAMESPACE = ("lakes", "bank")
PLACES = ("staged", "table-written", "before-manifest", "after-manifest", "before-shown", "shown")


def head(stack):
    return open_chain(stack.lake).head()


def shown(stack):
    found = head(stack)
    return found is not None and len(found.readable) == 3 and found


def settings(server):
    name = ".".join(NAMESPACE)
    return f'[lake.catalog]\ntype = "rest"\nuri = "{server.uri}"\nnamespace = "{name}"\nallow_http = true\n'


def versions(server):
    """Up to which version of the log each table is for plain readers; 0 for a copy. Every transaction changes all of them."""
    found = []
    with server.lock:
        for name, metadata in server.tables.items():
            main = metadata["refs"].get("main")
            if len(name) == 5 and main is not None:
                by_id = {s["snapshot-id"]: s["summary"] for s in metadata["snapshots"]}
                found.append(int(by_id[main["snapshot-id"]]["tuskline.version"]))
    return found


@contextmanager
def always_whole(server):
    """Looks at the catalog all the time, as other engines do: its tables are never of two epochs."""
    stop, parts = threading.Event(), []

    def look():
        while not stop.wait(0.005):
            seen = versions(server)
            if len(set(seen)) > 1:
                parts.append(seen)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert parts == []


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_driver_killed_anywhere_leaves_whole_epochs_in_the_catalog(
    tmp_path, database, spark, seed
):
    database.execute(*TABLES)
    stop = threading.Event()
    with (
        RestServer().running() as server,
        Stack(tmp_path, {"shop": database.dsn}, epoch_interval=0.5, lake=settings(server)) as stack,
        ExitStack() as looked_at,
    ):
        stack.start("log-server", "bridge", "lake")
        wait_for(lambda: shown(stack), 240, "the first epoch")
        load = threading.Thread(target=transfer, args=(database.dsn, stop, seed, 0.05))
        load.start()
        wait_for(lambda: versions(server) and min(versions(server)), 240, "an epoch of all tables")
        try:
            stack.kill("lake")
            looked_at.enter_context(always_whole(server))
            for place in PLACES:
                before = head(stack)
                stack.start("lake", env={"TUSKLINE_FAIL_POINT": place})
                assert stack.wait("lake", 240) == -signal.SIGKILL
                assert head(stack).term == before.term + 1
                check(read(spark, stack.lake))
            stack.start("lake")
            after = head(stack).link + 3
            wait_for(lambda: head(stack).link >= after, 240, "epochs go on")
            stopped_and_continued(stack, server, spark, database)
        finally:
            stop.set()
            load.join()
        stack.start("lake")
        source = Source("shop", database.dsn, "tuskline_shop")
        flush(stack.lake, stack.log_address, [source], timeout=240)
        assert stack.stop("lake") == 0
        assert_equal(database.dsn, read(spark, stack.lake))
        assert_no_orphans(spark, stack.lake)
        server.assert_no_stray_manifest((*NAMESPACE, "tuskline_epochs"))


def stopped_and_continued(stack, server, spark, database):
    """The driver sleeps between its look at the catalog and its commit, while another one takes over."""
    pid, stopped = stack.pid("lake"), threading.Event()

    def seen(method, path):
        # The last look before the commit that shows an epoch.
        if method == "GET" and path.endswith("/tuskline_epochs") and not stopped.is_set():
            os.kill(pid, signal.SIGSTOP)
            stopped.set()

    server.seen = seen
    assert stopped.wait(120)
    rest = LakeCatalog(server.uri, namespace=NAMESPACE, allow_http=True)
    source = Source("shop", database.dsn, "tuskline_shop")
    newer = Lakehouse(spark, stack.lake, stack.log_address, [source], rest=rest)
    try:
        newer.run_once(force=True)
        assert newer._writer is not None
        taken = newer._writer.head
        with server.lock:
            before = copy.deepcopy(server.tables)
        os.kill(pid, signal.SIGCONT)
        assert stack.wait("lake", 120) == Cause.FENCED
        assert server.tables == before
        assert head(stack) == taken
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        newer.close()
