"""A change log and captures as processes of their own, which a test may kill, stop and start again."""

import json
import signal
import struct
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psycopg

from tests.support.child import start_child
from tests.support.servers import DEFAULT, MakeServer
from tests.support.suspended import suspend
from tests.support.waiting import wait_for
from walsender_bridge.capture.gate.core import Rule
from walsender_bridge.capture.settings import CaptureSettings
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.change_log.client import (
    LogClient,
    ReplicaClient,
    ReplicaStatus,
    read_payload,
    split_messages,
)
from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.demo.local_server import LocalServer, free_port
from walsender_bridge.postgres.protocol import pgoutput

STREAM = "shop"
SLOT = PUBLICATION = f"tuskline_{STREAM}"


class ChangeLog:
    """Log servers as processes, one by default, and the repository in this one."""

    def __init__(self, folder: Path, policy: ReplicationPolicy | None = None) -> None:
        self.folder = folder
        self.policy = policy or ReplicationPolicy()
        #: Seconds; holds from the repository's next start on.
        self.retention = 3600.0
        self.listens = [f"127.0.0.1:{free_port()}" for _ in range(self.policy.replicas)]
        self.log_server_listen = self.listens[0]
        self.listen = f"127.0.0.1:{free_port()}"
        self.log_servers: dict[int, subprocess.Popen[bytes]] = {}
        self.repository: RepositoryServer | None = None

    @property
    def address(self) -> str:
        return f"grpc://{self.listen}"

    def __enter__(self) -> Self:
        for number in range(len(self.listens)):
            self.start_log_server(number)
        self.start_repository()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop_repository()
        for number in range(len(self.listens)):
            self.kill_log_server(number)

    def place(self, number: int = 0) -> Path:
        """The data directory of a log server."""
        return self.folder / f"log-server{number or ''}"

    def start_log_server(self, number: int = 0) -> None:
        place = self.place(number)
        self.log_servers[number] = start_child(
            "walsender_bridge.change_log.log_server",
            ReplicaServerSettings(place, self.listens[number]),
            log=place.with_suffix(".log"),
        )

    def kill_log_server(self, number: int = 0) -> None:
        if process := self.log_servers.pop(number, None):
            process.kill()
            process.wait()

    def signal_log_server(self, signal_: int, number: int = 0) -> None:
        process = self.log_servers[number]
        if signal_ == signal.SIGSTOP:
            suspend(process.pid)
        else:
            process.send_signal(signal_)

    def start_repository(self) -> None:
        self.repository = RepositoryServer(
            self.folder / "repository",
            self.listen,
            log_servers=self.listens,
            retention=self.retention,
            replication=self.policy,
        )
        self.repository.start()

    def stop_repository(self) -> None:
        if self.repository is not None:
            self.repository.stop()
            self.repository = None

    def replica_status(self) -> ReplicaStatus:
        with ReplicaClient(f"grpc://{self.log_server_listen}") as replica:
            return replica.stream_status(STREAM)

    def committed_lsn(self) -> int:
        with LogClient(self.address) as log:
            cut = log.status().streams.get(STREAM)
        return 0 if cut is None else cut.last_end_lsn

    def members(self) -> list[int]:
        """The numbers of the log servers that are in sync."""
        assert self.repository is not None
        state = self.repository._state
        stream = state.streams.get(STREAM)
        if stream is None or stream.sealed:
            return []
        return sorted(self.listens.index(state.log_servers[each][7:]) for each in stream.members)

    def messages(self) -> list[bytes]:
        """Every message of every entry that is readable."""
        with LogClient(self.address) as log:
            cut = log.status().streams[STREAM]
        with StreamReader.of(cut) as reader:
            return [
                bytes(message)
                for entry in reader.read(cut.low_offset, cut.end_offset)
                for message in split_messages(read_payload(entry.data))
            ]


class CaptureProcess:
    """`python -m walsender_bridge.capture` for one database."""

    def __init__(
        self,
        folder: Path,
        log: ChangeLog,
        dsn: str,
        *tables: str,
        spool_limit: int = 1 << 30,
        gate: Rule = Rule(),  # noqa: B008  # it is frozen
        commit_page: Path | None = None,
        status_file: Path | None = None,
    ) -> None:
        self.folder = folder
        self.status_file = status_file or folder / "capture.json"
        self.spool = folder / "spool"
        self.output = folder / "capture.log"
        #: From the next start on.
        self.settings = CaptureSettings(
            CaptureSource(STREAM, dsn, SLOT, PUBLICATION, tables),
            log.address,
            self.spool,
            spool_limit,
            folder / "gate.jsonl",
            gate,
            commit_page,
            status_file=self.status_file,
        )
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        if error is not None and self.output.exists():
            print(self.output.read_text()[-4000:])

    def start(self) -> None:
        self.process = start_child("walsender_bridge.capture", self.settings, log=self.output)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(30)
        self.process = None
        return code

    def wait(self, seconds: float = 30.0) -> int:
        """The exit code of one that ends by itself."""
        assert self.process is not None
        code = self.process.wait(seconds)
        self.process = None
        return code

    def status(self) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads(self.status_file.read_text())
        except FileNotFoundError:
            return {}
        return record

    def streams(self) -> bool:
        """Whether this process says that it streams."""
        status = self.status()
        own = self.process is not None and status.get("pid") == self.process.pid
        return own and status.get("state") == "streaming"


def make_tables(connection: psycopg.Connection[Any]) -> None:
    """Two tables that every transaction of `Load` writes to."""
    connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY, pad text)")
    connection.execute("CREATE TABLE audit (order_id bigint, pad text)")
    connection.execute("ALTER TABLE audit REPLICA IDENTITY FULL")


def server_with_tables(
    make_server: MakeServer, major: int = DEFAULT, **settings: str
) -> LocalServer:
    """A server of the test's own, which runs, with the two tables."""
    server = make_server(major, **settings)
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
    return server


@dataclass
class Load:
    """Clients that commit small transactions over both tables until stopped; the server may die."""

    dsn: str
    clients: int = 3
    pause: float = 0.002
    _stop: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Self:
        for number in range(self.clients):
            thread = threading.Thread(target=self._client, args=(number,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the clients; what they have committed is committed."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _client(self, number: int) -> None:
        order = number * 10_000_000
        while not self._stop.is_set():
            try:
                with psycopg.connect(self.dsn, autocommit=True) as connection:
                    while not self._stop.is_set():
                        order += 1
                        with connection.transaction():
                            connection.execute(
                                "INSERT INTO orders VALUES (%s, repeat('o', 50))", [order]
                            )
                            connection.execute(
                                "INSERT INTO audit VALUES (%s, repeat('a', 80))", [order]
                            )
                        self._stop.wait(self.pause)
            except psycopg.Error:
                # The server is down: this order's fate is unknown, the next number is not.
                self._stop.wait(0.05)


@dataclass
class Content:
    """What a log holds: keys in log order, by table, and each transaction's end LSN."""

    keys: dict[str, list[int]]
    ends: list[int]


def content(log: ChangeLog) -> Content:
    """The log's content; fails unless it is whole transactions with growing end LSNs."""
    messages = log.messages()
    with ReplicaClient(f"grpc://{log.log_server_listen}") as replica:
        relations = [pgoutput.parse_relation(r) for r in map(_relation, replica.relations(STREAM))]
    names = {relation.oid: relation.name for relation in relations}
    keys: dict[str, list[int]] = {name: [] for name in ("orders", "audit")}
    ends: list[int] = []
    inside = None
    for message in messages:
        if message[0] == pgoutput.BEGIN:
            assert inside is None
            inside = pgoutput.parse_begin(message)
        elif message[0] == pgoutput.COMMIT:
            done = pgoutput.parse_commit(message)
            assert inside is not None
            assert inside.final_lsn == done.commit_lsn
            inside = None
            ends.append(done.end_lsn)
        elif message[0] == pgoutput.INSERT:
            assert inside is not None
            keys.setdefault(names[pgoutput.relation_oid(message)], []).append(_key(message))
    assert inside is None, "the log was cut inside a transaction"
    assert ends == sorted(set(ends)), "a transaction is doubled or out of order"
    return Content(keys, ends)


def _relation(record: bytes) -> bytes:
    (size,) = struct.unpack_from("<I", record)
    return record[4 : 4 + size]


def _key(insert: bytes) -> int:
    """The first column, in text."""
    (size,) = struct.unpack_from(">I", insert, 9)
    return int(insert[13 : 13 + size])


def check_equal(log: ChangeLog, dsn: str, seconds: float = 60.0) -> Content:
    """Wait until the log has everything; then it must hold every committed key exactly once."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        end = wal_end(connection)
        connection.execute("UPDATE tuskline.flush SET token = token + 1")
        wait_for(lambda: log.committed_lsn() > end, seconds, "the log has the last transaction")
        found = content(log)
        for table, column in (("orders", "id"), ("audit", "order_id")):
            rows = connection.execute(f"SELECT {column} FROM {table}".encode()).fetchall()
            keys, own = found.keys[table], {key for (key,) in rows}
            lost, strange = sorted(own - {*keys}), sorted({*keys} - own)
            assert (lost[:9], strange[:9]) == ([], []), (
                f"{table}: lost {lost[:9]} ({len(lost)}), not there {strange[:9]}"
            )
            assert len(keys) == len(rows), f"{table}: doubled"
    return found


def wal_end(connection: psycopg.Connection[Any]) -> int:
    """The insert position, as an LSN."""
    row = connection.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
    assert row is not None
    return int(row[0])


def slot_lsn(connection: psycopg.Connection[Any], column: str = "confirmed_flush_lsn") -> int:
    """A position of the slot, as an LSN."""
    row = connection.execute(
        f"SELECT {column} - '0/0'::pg_lsn FROM pg_replication_slots WHERE slot_name = %s".encode(),
        [SLOT],
    ).fetchone()
    return 0 if row is None or row[0] is None else int(row[0])
