"""Safekeepers and a proposer as processes, around a real primary."""

import json
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import psycopg

from tests.support.child import start_child
from tests.support.listeners import of_process
from tests.support.servers import DEFAULT, MakeServer
from tests.support.suspended import suspend
from tests.support.waiting import wait_for
from tests.support.wal_server import WalServerProcess
from walsender_bridge.demo.local_server import LocalServer, free_port
from walsender_bridge.demo.local_server.account import server_account
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.quorum.proposer.settings import ProposerSettings
from walsender_bridge.quorum.proposer.status import without_session
from walsender_bridge.quorum.safekeeper.archive.settings import ArchiverSettings
from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings
from walsender_bridge.runtime import json_model

NAME = "tuskline_quorum"


class QuorumStack:
    """`count` safekeepers under `folder`, and a proposer that attaches them to `server`."""

    def __init__(self, folder: Path, server: LocalServer, count: int = 3) -> None:
        self.folder = folder
        self.server = server
        self.ports = [free_port() for _ in range(count)]
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.names = [f"safekeeper-{n}" for n in range(count)]
        #: How many of them the proposer is told of at its start.
        self.configured = count
        #: What is different in its settings, by the process's name.
        self.options: dict[str, dict[str, Any]] = {}
        #: When the proposer was started last, in seconds; 0: it is somebody else's.
        self._proposer_since = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        print(self.logs())  # shown if the test has failed
        for name in list(self.processes):
            self.kill(name)

    # -- processes ----------------------------------------------------------------------------------

    def start(self, *names: str) -> None:
        """`safekeeper-N` or `proposer`; without names all of them."""
        for name in names or (*self.names, "proposer"):
            self._start(name)

    def start_mortal(self, name: str, place: str) -> None:
        """Start a process anew that dies when it comes by that fail point."""
        if name in self.processes:
            self.kill(name)
        self._start(name, TUSKLINE_FAIL_POINT=place)

    def start_with(self, name: str, **environment: str) -> None:
        """Start a process with more in its environment."""
        self._start(name, **environment)

    def start_as(self, name: str, **changes: Any) -> None:
        """Start a process with other settings, this once."""
        kept = self.options.get(name, {})
        self.options[name] = {**kept, **changes}
        self._start(name)
        self.options[name] = kept

    def _start(self, name: str, **environment: str) -> None:
        if name == "proposer":  # what the last one said is not what this one does
            self.status_file.unlink(missing_ok=True)
            self._proposer_since = time.time()
        module, settings = self._child(name)
        settings = replace(settings, **self.options.get(name, {}))
        self.processes[name] = start_child(module, settings, log=self.log(name), **environment)

    def _child(self, name: str) -> tuple[str, Any]:
        """Its module and its settings."""
        quorum = "walsender_bridge.quorum"
        if name == "proposer":
            return f"{quorum}.proposer", ProposerSettings(
                self.server.dsn(),
                self.safekeepers,
                NAME,
                "tuskline_safekeepers",
                members_file=self.members_file,
                quorum_file=self.quorum_file,
                commit_page=self.commit_page,
                status_file=self.status_file,
            )
        number = int(name.rpartition("-")[2])
        if name.startswith("archiver"):
            return f"{quorum}.safekeeper.archive.process", ArchiverSettings(self.data(number), "")
        page = self.folder / f"positions-{number}"
        return f"{quorum}.safekeeper", SafekeeperSettings(
            self.data(number), "127.0.0.1", self.ports[number], page
        )

    @property
    def safekeepers(self) -> tuple[tuple[str, int], ...]:
        """Those that the proposer is told of at its start."""
        return tuple(("127.0.0.1", port) for port in self.ports[: self.configured])

    def one_more(self) -> int:
        """Start a safekeeper that no configuration names; its number."""
        number = len(self.ports)
        self.ports.append(free_port())
        self.names.append(f"safekeeper-{number}")
        self.start(self.names[-1])
        wait_for(lambda: self.listens(number), 20, f"it listens: {self.logs()}")
        return number

    def listens(self, number: int) -> bool:
        """Whether a safekeeper takes connections."""
        try:
            socket.create_connection(("127.0.0.1", self.ports[number]), timeout=1).close()
        except OSError:
            return False
        return True

    def address(self, number: int) -> str:
        """Where a safekeeper listens for proposers."""
        return f"127.0.0.1:{self.ports[number]}"

    @property
    def status_file(self) -> Path:
        """Where the proposer says how far it is."""
        return self.folder / "proposer.json"

    @property
    def commit_page(self) -> Path:
        """Where the proposer states what a quorum has, for commit gates."""
        return self.folder / "commit.page"

    @property
    def members_file(self) -> Path:
        """Where a change of the membership is asked for."""
        return self.folder / "members.json"

    @property
    def quorum_file(self) -> Path:
        """Where the bridge records its quorum's id."""
        return self.folder / "quorum-id.json"

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """End a process with a signal; its exit code."""
        process = self.processes.pop(name)
        process.send_signal(number)
        process.send_signal(signal.SIGCONT)
        return process.wait(timeout=30)

    def pause(self, name: str) -> None:
        """SIGSTOP: it hangs."""
        suspend(self.processes[name].pid)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self.processes[name].send_signal(signal.SIGCONT)

    def data(self, number: int) -> Path:
        """A safekeeper's data directory."""
        return self.folder / f"data-{number}"

    def log(self, name: str) -> Path:
        """What a process has said."""
        return self.folder / f"{name}.log"

    def logs(self) -> str:
        """The ends of all logs, for a failure."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-1500:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    # -- the primary --------------------------------------------------------------------------------

    def attach(self) -> None:
        """Have commits wait for the quorum, once it is there: safekeepers that are new form none on a server that waits."""
        wait_for(self._streams, 60, f"the proposer is there: {self.logs()}")
        with psycopg.connect(self.server.dsn(), autocommit=True) as connection:
            connection.execute("SET synchronous_commit = local")
            for setting in (
                f"synchronous_standby_names = 'ANY 1 ({NAME})'",
                "synchronous_commit = on",
            ):
                connection.execute(f"ALTER SYSTEM SET {setting}".encode())
            connection.execute("SELECT pg_reload_conf()")
        wait_for(self.is_sync, 60, f"the quorum is there: {self.logs()}")

    def _streams(self) -> bool:
        return bool(self.replication("true"))

    def is_sync(self) -> bool:
        """Whether the proposer is the primary's synchronous standby."""
        return self.replication("sync_state") in ([("sync",)], [("quorum",)])  # by FIRST, or by ANY

    def replication(self, expression: str) -> list[Any]:
        """Of the proposer that was started last: the walsender of a dead one ends a moment after it."""
        return self.ask(
            f"SELECT {expression} FROM pg_stat_replication"
            " WHERE application_name = %s AND backend_start >= to_timestamp(%s)",
            NAME,
            self._proposer_since,
        )

    def ask(self, query: str, *values: Any) -> list[Any]:
        """A statement; the rows of a query."""
        with psycopg.connect(self.server.dsn(), autocommit=True) as connection:
            cursor = connection.execute(query.encode(), values)
            return cursor.fetchall() if cursor.description else []

    def status(self) -> dict[str, Any]:
        """What the proposer that was started last says; until it has said anything, what one says without a session."""
        try:
            found: dict[str, Any] = json.loads(self.status_file.read_text())
        except FileNotFoundError:
            return {**json_model.plain(without_session("starting")), "term": 0}
        return found

    def make_wal(self, mebibytes: int) -> int:
        """Have the primary write so much, without a commit that waits for it; where its WAL ends."""
        self.ask(
            "SET synchronous_commit = local; SELECT count(pg_logical_emit_message(true, 'bulk',"
            f" repeat('x', 1 << 20))) FROM generate_series(1, {mebibytes})"
        )
        return parse_lsn(self.flush_lsn())

    def held(self, number: int) -> int:
        """Up to where the proposer knows a safekeeper to have the WAL; 0 while it is away."""
        found = {each["address"]: each["flush_lsn"] for each in self.status()["safekeepers"]}
        return parse_lsn(found.get(self.address(number)) or "0/0")

    def fault(self, number: int) -> str:
        """What the proposer says is wrong with a safekeeper; empty: nothing."""
        found = {each["address"]: each["fault"] for each in self.status()["safekeepers"]}
        return found.get(self.address(number)) or ""

    def insert(self, number: int, *, timeout_ms: int = 30_000) -> None:
        """One commit, which returns."""
        insert(self.server, number, timeout_ms=timeout_ms)

    def committed_to(self, lsn: str) -> bool:
        """Whether the proposer says that a quorum has all up to there."""
        return parse_lsn(self.status()["commit_lsn"]) >= parse_lsn(lsn)

    def flush_lsn(self) -> str:
        """The primary's durable end of WAL."""
        found: str = self.ask("SELECT pg_current_wal_flush_lsn()")[0][0]
        return found

    def wal_server(self, number: int, **options: Any) -> WalServerProcess:
        """The WAL server of a safekeeper, to be started."""
        data = self.data(number)
        held = SimpleNamespace(folder=data / "wal", page=self.folder / f"positions-{number}")
        return WalServerProcess(data, held, **options)

    def segments(self, number: int) -> dict[str, bytes]:
        """A safekeeper's complete segments. What goes meanwhile is not there."""
        found = {}
        for path in (self.data(number) / "wal").iterdir():
            if len(path.name) == 24:
                with suppress(FileNotFoundError):
                    found[path.name] = path.read_bytes()
        return found


class Load:
    """Inserts numbers, each in a transaction of its own; `acknowledged` are those whose COMMIT returned."""

    def __init__(self, server: LocalServer, first: int = 0) -> None:
        self._server = server
        self._stop = threading.Event()
        self.acknowledged: list[int] = []
        self._thread = threading.Thread(target=self._run, args=(first,), daemon=True)
        self._thread.start()

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            try:
                with psycopg.connect(self._server.dsn(), autocommit=True) as connection:
                    while not self._stop.is_set():
                        number += 1
                        connection.execute("INSERT INTO load VALUES (%s)", [number])
                        self.acknowledged.append(number)
            except psycopg.Error:
                self._stop.wait(0.1)

    def stop(self) -> list[int]:
        """End it; what was acknowledged."""
        self._stop.set()
        self._thread.join(30)
        return self.acknowledged


def load_server(
    make_server: MakeServer,
    major: int = DEFAULT,
    *,
    small: bool = False,
    client: bool = False,
    **settings: str,
) -> LocalServer:
    """A server that runs, with the table `load`. `small`: segments of 1 MiB; `client`: an ordinary role."""
    server = make_server(major=major, **settings)
    if small:
        small_segments(server)
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE TABLE load (number int PRIMARY KEY)")
        if client:
            connection.execute("CREATE ROLE client LOGIN PASSWORD 'client'")
            connection.execute("GRANT INSERT, SELECT ON load TO client")
    return server


def insert(server: LocalServer, number: int, *, timeout_ms: int = 20_000) -> None:
    """One commit, which returns."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"SET statement_timeout = {timeout_ms}".encode())
        connection.execute("INSERT INTO load VALUES (%s)", [number])


def in_background(server: LocalServer, number: int) -> threading.Thread:
    """A commit whose connection may break; the thread that it returns in."""

    def commit() -> None:
        try:
            insert(server, number)
        except psycopg.Error:
            return

    thread = threading.Thread(target=commit, daemon=True)
    thread.start()
    return thread


def waits(server: LocalServer, number: int) -> threading.Thread:
    """A commit that waits, and has not returned after a second; the thread that it returns in."""
    before = _waiting(server)
    thread = in_background(server, number)
    # Until then it may not have reached the server, which on a busy machine looks the same.
    wait_for(lambda: not thread.is_alive() or _waiting(server) > before, 20, "the commit waits")
    thread.join(1.0)
    assert thread.is_alive(), "the commit returned without a quorum"
    return thread


def _waiting(server: LocalServer) -> int:
    """How many commits wait for a standby."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        ).fetchone()
    assert row is not None
    return int(row[0])


def numbers(server: LocalServer) -> set[int]:
    """What is in the table."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        return {number for (number,) in connection.execute("SELECT number FROM load")}


def small_segments(server: LocalServer) -> None:
    """Give a server that has never run WAL segments of 1 MiB."""
    tool = server.installation.tool("pg_resetwal")
    server_account().run([tool, "--wal-segsize=1", "-D", server.data_dir])


def peak_memory(process: subprocess.Popen[bytes]) -> int:
    """The most memory that a process had at once, in bytes."""
    return of_process(process.pid, "VmHWM") << 10
