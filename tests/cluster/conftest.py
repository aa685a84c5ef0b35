"""Fixtures that the tests on real servers share: a log, the two tables, and a capture of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.capture_stack import CaptureProcess, ChangeLog, make_tables
from tests.support.failover_stack import FailoverStack
from tests.support.servers import Database
from tests.support.waiting import wait_for
from tests.support.wal_server import Receivers
from walsender_bridge.local_server import LocalServer


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ChangeLog]:
    """An empty change log with a keeper of its own."""
    with ChangeLog(tmp_path) as log:
        yield log


@pytest.fixture
def shop(database: Database) -> Database:
    """The test's database, with the two tables."""
    with database.connect() as connection:
        make_tables(connection)
    return database


@pytest.fixture
def capture(tmp_path: Path, log: ChangeLog, server: LocalServer) -> Iterator[CaptureProcess]:
    """A capture of the two tables that streams from the test module's `server`."""
    with CaptureProcess(tmp_path, log, server.dsn(), "public.orders", "public.audit") as capture:
        wait_for(capture.streams, 30, "capture streams")
        yield capture
        print(capture.output.read_text()[-4000:])


@pytest.fixture
def stack(tmp_path: Path, primary: LocalServer) -> Iterator[FailoverStack]:
    """A quorum around the test module's `primary`, which has a standby; one WAL server runs."""
    with FailoverStack(tmp_path, primary) as stack:
        stack.start()
        stack.standby()
        stack.attach()
        stack.serve()
        yield stack


@pytest.fixture
def receive() -> Iterator[Receivers]:
    """Starts real `pg_receivewal`s, which end with the test."""
    made = Receivers()
    yield made
    made.end()
