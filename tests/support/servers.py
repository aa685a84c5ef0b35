"""PostgreSQL for tests: one server of each major in a worker, a fresh database for each test."""

import contextlib
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from walsender_bridge.demo.local_server import Installation, LocalServer, by_major

OLDEST, NEWEST = 11, 18
#: The major of a test that does not ask for another; always there, it comes with the dependencies.
DEFAULT = 16

#: `make(major=16, **settings)`: a server of the test's own, not started, that it may kill.
MakeServer = Callable[..., LocalServer]


def majors() -> list[int]:
    """The majors that tests run on here."""
    return sorted(major for major in by_major() if major <= NEWEST)


def missing() -> list[int]:
    """The supported majors that are not here."""
    return [major for major in range(OLDEST, NEWEST + 1) if major not in majors()]


#: Runs a test that takes `pg_server` (or `database`) once on each major that is here.
each_major = pytest.mark.parametrize("pg_server", majors(), indirect=True, ids="pg{}".format)

#: The majors as parameters of a test that takes long: the default one, the others in `make test-all` alone.
MAJORS_IN_TURN = [
    pytest.param(major, marks=[] if major == DEFAULT else [pytest.mark.long]) for major in majors()
]


class Servers:
    """The worker's shared servers, each started when it is first asked for. Tests do not stop them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[int, Installation] = by_major()
        self._running: dict[int, LocalServer] = {}

    def get(self, major: int = DEFAULT) -> LocalServer:
        """The running server of `major`."""
        if major not in self._running:
            server = LocalServer.create(
                self._found[major], self._folder / f"pg{major}", settings={"fsync": "off"}
            )
            self._running[major] = server
            server.start()
        return self._running[major]

    def destroy(self) -> None:
        for server in self._running.values():
            server.destroy()


@dataclass(frozen=True)
class Database:
    """A database of one test."""

    name: str
    server: LocalServer

    @property
    def dsn(self) -> str:
        return self.server.dsn(self.name)

    def connect(self) -> psycopg.Connection:
        """A connection in autocommit."""
        return psycopg.connect(self.dsn, autocommit=True)

    def execute(self, *statements: str) -> None:
        """Run statements, each in a transaction of its own."""
        with self.connect() as connection:
            for statement in statements:
                connection.execute(statement.encode())


@pytest.fixture(scope="session")
def pg_servers() -> Iterator[Servers]:
    with tempfile.TemporaryDirectory(prefix="tuskline-test-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        servers = Servers(folder)
        try:
            yield servers
        finally:
            servers.destroy()


@pytest.fixture
def pg_server(pg_servers: Servers, request: pytest.FixtureRequest) -> LocalServer:
    """The shared server of 16, or of the major that `each_major` asks for."""
    return pg_servers.get(getattr(request, "param", DEFAULT))


@contextlib.contextmanager
def fresh_database(server: LocalServer) -> Iterator[Database]:
    """A database of the server, dropped with its slots and connections afterwards."""
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    try:
        yield Database(name, server)
    finally:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            _drop(connection, name)


@pytest.fixture
def database(pg_server: LocalServer) -> Iterator[Database]:
    """A fresh database, dropped with its slots and connections afterwards."""
    with fresh_database(pg_server) as made:
        yield made


@pytest.fixture
def make_server() -> Iterator[MakeServer]:
    """Makes servers that belong to the test alone: `make_server(major=16, fsync="on", ...)`."""
    made: list[LocalServer] = []
    with tempfile.TemporaryDirectory(prefix="tuskline-test-") as folder:
        Path(folder).chmod(0o755)

        def make(major: int = DEFAULT, **settings: str) -> LocalServer:
            place = Path(folder) / f"server-{len(made)}"
            server = LocalServer.create(by_major()[major], place, settings=settings)
            made.append(server)
            return server

        yield make
        for server in made:
            server.destroy()


def drop_slot(database: Database, name: str) -> None:
    """Drop a slot of its database: the walsender of a client that has ended has it for a moment still."""
    deadline = time.monotonic() + 30
    while True:
        try:
            database.execute(f"SELECT pg_drop_replication_slot('{name}')")
        except psycopg.errors.ObjectInUse:
            assert time.monotonic() < deadline, f"slot {name} is in use"
            time.sleep(0.02)
        else:
            return


def _drop(connection: psycopg.Connection, name: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", [name]
        )
        try:
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE database = %s AND NOT active",
                [name],
            )
            connection.execute(sql.SQL("DROP DATABASE {}").format(sql.Identifier(name)))
        except (psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject):
            # A backend takes a moment to end, and holds its slot until then.
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return
