"""Two ways to copy a primary's logical slots to three standbys: Tuskline's controller, and Debian's pg_failover_slots.

One primary, and three standbys for each side, which all run all the time; a side works between `resume` and `pause`.
Each side comes to the primary as a role of its own, over TCP and with SCRAM, so the primary itself can tell whose
statements and processes it serves.
"""

import os
import signal
import subprocess
import sys
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.processes import cpu_seconds
from tests.support import extension
from tests.support.wal_server import backup, follow
from walsender_bridge.demo.local_server import LocalServer, by_major, free_port
from walsender_bridge.demo.local_server.account import reachable_place, server_account
from walsender_bridge.runtime.closing import Closing

MAJOR = 17
STANDBYS = 3
_HERE = Path(__file__).resolve().parent
_PASSWORD = "bench"  # noqa: S105  # of servers that end with the benchmark
_SETTINGS = {
    "fsync": "off",
    "autovacuum": "off",
    "wal_writer_delay": "10ms",
    "checkpoint_timeout": "1h",
    "max_wal_senders": "20",
    "wal_keep_size": "1GB",
    "pg_stat_statements.track_utility": "on",
}

Rows = list[tuple[Any, ...]]
#: Of a slot: plugin, database, two_phase, restart_lsn, confirmed_flush_lsn.
Shown = dict[str, tuple[Any, ...]]


def prepare() -> tuple[str, Path]:
    """Unpack Debian's PostgreSQL 17, its headers and the peer. Returns the peer's version and library folder."""
    scripts = _HERE.parent / "tests" / "support"
    for name, script in (
        ("TUSKLINE_POSTGRES", "other_majors.sh"),
        ("TUSKLINE_PG_CONFIG", "server_headers.sh"),
    ):
        if not os.environ.get(name):
            os.environ[name] = _output(scripts / script)
    extension.pg_config.cache_clear()
    if MAJOR not in by_major():
        raise RuntimeError(f"PostgreSQL {MAJOR} of Debian is not here: see {scripts}")
    place = reachable_place(server_account()) / "benchmarks" / "pg_failover_slots"
    version, folder = _output(_HERE / "failover_slots.sh", place).split()
    return version, Path(folder)


def _output(script: Path, *arguments: Path) -> str:
    done = subprocess.run(
        ["bash", script, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.strip()


def ask(connection: psycopg.Connection, query: str, *values: Any) -> Rows:
    """All rows."""
    cursor = connection.execute(query.encode(), values or None)
    return cursor.fetchall() if cursor.description else []


def logical_slots(connection: psycopg.Connection) -> Shown:
    """A server's logical slots by name; positions as numbers."""
    query = (
        "SELECT slot_name, plugin, database, two_phase, restart_lsn - '0/0',"
        " confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE slot_type = 'logical'"
    )
    return {name: tuple(rest) for name, *rest in ask(connection, query)}


class Servers(Closing):
    """The primary with `count` logical slots, and the standbys of both sides, all running."""

    def __init__(self, folder: Path, count: int, peer_library: Path) -> None:
        self.library = extension.build(MAJOR)
        settings = {
            **extension.plugin_settings(MAJOR, self.library),
            **_SETTINGS,
            "max_replication_slots": str(count + 20),
            "shared_preload_libraries": "pg_stat_statements, pg_failover_slots",
        }
        settings["dynamic_library_path"] += f":{peer_library}"
        self.primary = LocalServer.create(by_major()[MAJOR], folder / "primary", settings=settings)
        self.standbys: dict[str, list[LocalServer]] = {"own": [], "peer": []}
        self._folder = folder
        self.count = count

    def start(self) -> None:
        """Create and start all of them."""
        self.primary.start()
        extension.create_extension(self.primary, self.library)
        with psycopg.connect(self.primary.dsn(), autocommit=True) as connection:
            for statement in (
                "CREATE EXTENSION pg_stat_statements",
                "CREATE TABLE moved (number int)",
                f"CREATE ROLE own LOGIN REPLICATION PASSWORD '{_PASSWORD}'",
                "GRANT tuskline_slots, pg_read_all_stats TO own",
                "GRANT EXECUTE ON FUNCTION pg_log_standby_snapshot() TO own",
                f"CREATE ROLE peer LOGIN PASSWORD '{_PASSWORD}'",
            ):
                connection.execute(statement.encode())
            for side, servers in self.standbys.items():
                for number in range(STANDBYS):
                    servers.append(self._standby(connection, side, number))
            for number in range(self.count):
                connection.execute(
                    "SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [f"slot_{number}"]
                )

    def _standby(self, connection: psycopg.Connection, side: str, number: int) -> LocalServer:
        name = f"{side}_{number}"
        connection.execute("SELECT pg_create_physical_replication_slot(%s, true)", [name])
        own = {
            "shared_preload_libraries": "pg_failover_slots" if side == "peer" else "",
            "pg_failover_slots.synchronize_slot_names": "",
            "pg_failover_slots.primary_dsn": self.dsn("peer", dbname=False),
            # A new slot of the peer waits this long for its counterpart on the primary.
            "wal_retrieve_retry_interval": "20ms",
        }
        standby = backup(self.primary, self._folder / name, wal="fetch")
        follow(
            standby,
            self.primary.dsn(),
            primary_slot_name=name,
            hot_standby_feedback="on",
            **own,
        )
        standby.start()
        return standby

    def dsn(self, user: str, server: LocalServer | None = None, *, dbname: bool = True) -> str:
        """The connection string of a side for a server."""
        port = (server or self.primary).port
        name = " dbname=postgres" if dbname else ""
        return f"host=127.0.0.1 port={port} user={user} password={_PASSWORD}{name}"

    def close(self) -> None:
        """End all of them."""
        for server in [*self.standbys["own"], *self.standbys["peer"], self.primary]:
            server.destroy()
        extension.remove_built()


class Side(Closing):
    """One way to copy them. `name` is also its role; it polls the primary every `interval` s."""

    name = ""
    #: The processes of a role on a standby that work on copies.
    workers = ""

    def __init__(self, servers: Servers, interval: float) -> None:
        self.servers = servers
        self.interval = interval
        self.standbys = servers.standbys[self.name]
        self._connections = [psycopg.connect(s.dsn(), autocommit=True) for s in self.standbys]

    @abstractmethod
    def resume(self) -> None:
        """Start to copy the slots."""

    @abstractmethod
    def pause(self) -> None:
        """Stop copying them."""

    def missing(self) -> list[tuple[int, str, bool]]:
        """The missing copies: the standby's number, the slot, and whether the copy is being created."""
        wanted = {f"slot_{number}" for number in range(self.servers.count)}
        found = []
        for number, connection in enumerate(self._connections):
            there: dict[str, bool] = dict(
                ask(
                    connection,
                    "SELECT slot_name, active OR temporary FROM pg_replication_slots"
                    " WHERE slot_type = 'logical'",
                )
            )
            found += [(number, name, name in there) for name in wanted if there.get(name, True)]
        return found

    def copies(self) -> list[Shown]:
        """The copies of each standby."""
        return [logical_slots(connection) for connection in self._connections]

    def standby_cpu(self) -> float:
        """CPU seconds so far of the processes on the standbys that do the work, those that are there now."""
        return sum(
            cpu_seconds(pid)
            for connection in self._connections
            for (pid,) in ask(connection, f"SELECT pid FROM pg_stat_activity WHERE {self.workers}")
        )

    def own_cpu(self) -> float:
        """CPU seconds so far of what runs beside the servers."""
        return 0.0

    def close(self) -> None:
        """End it."""
        for connection in self._connections:
            connection.close()


class Own(Side):
    """`tuskline slots sync --watch`, one process for all three."""

    name = "own"
    workers = "usename = 'own'"

    def __init__(self, servers: Servers, interval: float, folder: Path) -> None:
        super().__init__(servers, interval)
        self._process: subprocess.Popen[bytes] | None = None
        self._log = folder / "controller.log"
        self._config = folder / "tuskline.toml"
        lines = [f'[log]\ndata_dir = "{folder / "log"}"\nlisten = "127.0.0.1:{free_port()}"']
        lines += [
            f'[[log_server]]\ndata_dir = "{folder / "log-server"}"\nlisten = "127.0.0.1:{free_port()}"'
        ]
        lines += [f'[[source]]\nname = "bench"\ndsn = "{servers.dsn("own")}"']
        lines += ["[slots]", f"poll = {interval}"]
        for number, standby in enumerate(self.standbys):
            lines += [f"[slots.candidates.own_{number}]", f'slot = "own_{number}"']
            lines.append(f'dsn = "{servers.dsn("own", standby)}"')
        self._config.write_text("\n".join(lines) + "\n")

    def resume(self) -> None:
        """Start the controller."""
        command = [sys.executable, "-m", "walsender_bridge.cli.app", "slots", "sync", "--watch"]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--config", str(self._config)], stdout=log, stderr=log
            )

    def pause(self) -> None:
        """End it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)
            self._process = None

    def own_cpu(self) -> float:
        """Of the controller."""
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"the controller has ended:\n{self._log.read_text()[-3000:]}")
        return cpu_seconds(self._process.pid)

    def close(self) -> None:
        """See `Side`."""
        self.pause()
        super().close()


class Peer(Side):
    """pg_failover_slots: a worker in each standby."""

    name = "peer"
    workers = "backend_type = 'pg_failover_slots worker'"

    def resume(self) -> None:
        """Let the workers copy every slot."""
        self._set("pg_failover_slots.worker_nap_time", str(round(self.interval * 1000)))
        self._set("pg_failover_slots.synchronize_slot_names", "name_like:%")

    def pause(self) -> None:
        """Let them copy no slot, so that they have nothing to do."""
        self._set("pg_failover_slots.synchronize_slot_names", "")

    def _set(self, name: str, value: str) -> None:
        for connection in self._connections:
            ask(connection, f"ALTER SYSTEM SET {name} = '{value}'")
            ask(connection, "SELECT pg_reload_conf()")


class Primary(Closing):
    """The primary's cost of a role, measured by a permanent connection."""

    def __init__(self, server: LocalServer) -> None:
        self._server = server
        self._connection = psycopg.connect(server.dsn(), autocommit=True)

    def statements(self, role: str, having: str = "") -> int:
        """Statements so far, those only that contain a text."""
        query = (
            "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements"
            " WHERE userid = %s::regrole AND strpos(query, %s) > 0"
        )
        return int(ask(self._connection, query, role, having)[0][0])

    def pids(self, role: str) -> list[int]:
        """Its processes now, without walsenders."""
        query = "SELECT pid FROM pg_stat_activity WHERE usename = %s AND backend_type = 'client backend'"
        return [pid for (pid,) in ask(self._connection, query, role)]

    def cpu(self, role: str, before: Iterable[int] = ()) -> dict[int, float]:
        """CPU seconds so far by process: the role's, those of `before` that live, and the postmaster's.

        The postmaster's are its own, of which connections are made, and those of all children that have ended.
        """
        found = {pid: _precise(pid) for pid in {*self.pids(role), *before}}
        found[self._server.pid] = _precise(self._server.pid) + _of_children(self._server.pid)
        return found

    def close(self) -> None:
        """End the connection."""
        self._connection.close()


def spent(before: dict[int, float], after: dict[int, float]) -> float:
    """CPU seconds between two answers of `Primary.cpu`; one that has ended is counted with the postmaster's since."""
    return sum(after.values()) - sum(before.values())


def _precise(pid: int) -> float:
    """User and system seconds of a process, to the nanosecond; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return 0.0


def _of_children(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def until(what: str, done: Callable[[], bool], seconds: float) -> None:
    """Wait for it."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise RuntimeError(f"after {seconds:g} s it was not so: {what}")
        time.sleep(0.05)
