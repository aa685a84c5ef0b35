"""A maintainer names tables that have something to expire; the driver cleans them, and the request goes when that is done."""

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spark_consumers import Source
from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.table_catalog import (
    Outcome,
    TableCommit,
    TableId,
    assert_uuid,
    remove_ref,
    set_ref,
)
from spark_consumers.lake.flush import flush
from spark_consumers.lake.maintenance.maintainer import Limits, Maintainer
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.writer import requests
from tests.support.capture_stack import STREAM
from tests.support.lake_pipeline import TABLES
from tests.support.stack import Stack
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause

DOCS = f"{STREAM}.public.docs"
LAKE = "retention = 0.5\n[lake.maintenance]\ninterval = 0.2\n"


class Table:
    """`docs`, as a user sees it through the lake's catalog."""

    def __init__(self, lake):
        self.chain, self.catalog = open_chain(lake), FolderCatalog(Path(lake))

    def there(self):
        head = self.chain.head()
        assert head is not None
        table = TableId.at(head.tables[DOCS].path)
        return table, self.catalog.load(table)

    def commit(self, update):
        """Beside the driver, so that it may be repeated."""

        def made():
            table, there = self.there()
            required = [assert_uuid(there.metadata["table-uuid"])]
            return (
                self.catalog.commit(TableCommit(table, required, [update], there.location))
                is Outcome.WON
            )

        wait_for(made, 30, "a commit of the user's")

    def snapshots(self):
        return {snapshot["snapshot-id"] for snapshot in self.there()[1].metadata["snapshots"]}

    def asked(self):
        """The request that waits."""
        return requests.first_of(self.chain, requests.CLEAN)


def outlive(table, change, expired, stopped=lambda: None):
    """A snapshot that only a user's branch keeps, in a table that nobody writes any more; it is dropped. Its id.

    `stopped`: the driver is, before that.
    """
    snapshot = table.chain.head().tables[DOCS].snapshot_id
    table.commit(set_ref("mine", snapshot, "branch"))
    change()

    def only_mine():
        expired()
        used = {link.tables[DOCS].snapshot_id for link in table.chain.links()}
        return snapshot not in used

    wait_for(only_mine, 60, "no epoch has it")
    stopped()
    assert snapshot in table.snapshots()
    table.commit(remove_ref("mine"))
    return snapshot


def test_a_table_that_a_maintainer_names_is_cleaned_by_the_running_driver(pipeline, database):
    house = pipeline.house = pipeline.lakehouse(retention_seconds=0.1)
    table, stop = Table(pipeline.lake), threading.Event()
    house.run_once()
    maintainer = Maintainer(pipeline.lake, Limits(interval=0.0))
    maintainer.begin()
    try:

        def touched(statement):
            # Nobody reads: a reader's lease would keep the links.
            database.execute(statement)
            version = pipeline.barrier()
            while pipeline.head().epoch < version:
                house.run_once()

        def change():
            touched("UPDATE docs SET n = n + 1")

        def expired():
            touched("UPDATE pairs SET at = now()")

        snapshot = outlive(table, change, expired)
        # The driver does not look at a table that has not changed.
        for _ in range(3):
            expired()
        assert snapshot in table.snapshots()
        maintainer.run_once(stop)
        path = pipeline.head().tables[DOCS].path
        assert maintainer.to_clean() == (path,)
        assert table.asked().tables == (path,)

        def carried_out():
            house.run_once()
            return table.asked() is None

        wait_for(carried_out, 30, "it is carried out")
        assert snapshot not in table.snapshots()
        assert maintainer.to_clean() == ()
    finally:
        maintainer.close()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_request_to_clean_outlives_drivers_and_maintainers(tmp_path, database):
    database.execute(*TABLES)
    with Stack(tmp_path, {STREAM: database.dsn}, epoch_interval=0.2, lake=LAKE) as stack:
        stack.start("log-server", "bridge", "lake")
        table = Table(stack.lake)

        def followed():
            head = table.chain.head()
            return head is not None and len(head.readable) == 3

        wait_for(followed, 120, "the first epoch")
        source = Source(STREAM, database.dsn, f"tuskline_{STREAM}")

        def touch(name):
            database.execute(f"UPDATE {name} SET {'n = n + 1' if name == 'docs' else 'at = now()'}")
            flush(stack.lake, stack.log_address, [source], timeout=120)

        maintain = ("lake", "maintain", "--once", "--json", "--timeout")
        # No driver runs: the request waits, and another maintainer makes no second one.
        snapshot = outlive(
            table, lambda: touch("docs"), lambda: touch("pairs"), lambda: stack.stop("lake")
        )
        for _ in range(2):
            found = stack.cli(*maintain, "1")
            assert found.returncode == Cause.TIMEOUT, found.stderr
            assert "something to expire" in found.stderr
        assert len(table.chain.store.names("_tuskline/requests")) == 1
        # A driver dies in the middle.
        stack.start("lake", env={"TUSKLINE_FAIL_POINT": "clean-expired"})
        assert stack.wait("lake", 120) == -signal.SIGKILL
        assert table.asked() is not None
        stack.start("lake")
        wait_for(lambda: table.asked() is None, 120, "it is carried out")
        assert snapshot not in table.snapshots()
        # A driver runs: the command returns when it has looked at the table.
        snapshot = outlive(
            table,
            lambda: touch("docs"),
            lambda: touch("pairs"),
            lambda: stack.signal("lake", signal.SIGSTOP),
        )
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(stack.cli, *maintain, "120")
            wait_for(table.asked, 60, "the request")
            stack.signal("lake", signal.SIGCONT)
            found = asking.result()
        assert found.returncode == 0, found.stderr
        # The driver may have been stopped in the middle of its housekeeping of the other table.
        assert json.loads(found.stdout)["cleaned"] >= 1
        assert snapshot not in table.snapshots()
        assert stack.stop("lake") == 0
