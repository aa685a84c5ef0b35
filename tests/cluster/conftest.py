"""Fixtures that the tests on real servers share: a log, the two tables, and a capture of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slot_sync.controller import Controller
from tests.support import extension
from tests.support.capture_stack import CaptureProcess, ChangeLog, make_tables
from tests.support.etcd import EtcdCluster
from tests.support.failover_stack import FailoverStack
from tests.support.servers import DEFAULT, Database
from tests.support.slot_sync import SlotStack, slot_stack
from tests.support.waiting import wait_for
from tests.support.wal_server import Receivers
from walsender_bridge.demo.local_server import LocalServer


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    """What a module's tests have built of the extension is removed behind its servers."""
    yield
    extension.remove_built()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """A module's cluster of etcd."""
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ChangeLog]:
    """An empty change log with a log server of its own."""
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


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(major, marks=[] if major == DEFAULT else [pytest.mark.long], id=f"pg{major}")
        for major in extension.buildable()
    ],
)
def slots_pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlotStack]:
    """A pair of servers with the extension that the tests of a module share."""
    with slot_stack(request.param, tmp_path_factory.mktemp("slots")) as stack:
        yield stack


@pytest.fixture
def synced_pair(slots_pair: SlotStack, tmp_path: Path) -> Iterator[SlotStack]:
    """The pair, running, with a record of the test's own; its slots go with the test."""
    slots_pair.folder = tmp_path
    yield slots_pair
    slots_pair.clear()


@pytest.fixture
def controller(synced_pair: SlotStack) -> Iterator[Controller]:
    """The pair's controller."""
    with synced_pair.controller() as controller:
        yield controller


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
