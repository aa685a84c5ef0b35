"""Three ways to make COMMIT wait for two of three copies of the WAL, each with real processes and one primary."""

import os
import signal
import subprocess
import time
from abc import abstractmethod
from pathlib import Path

import psycopg

from benchmarks.processes import cpu_seconds, tree_cpu_seconds
from tests.support.quorum_stack import NAME, QuorumStack
from tests.support.tls import HOSTS, Authority
from walsender_bridge.demo.local_server import LocalServer, free_port
from walsender_bridge.demo.local_server.account import server_account
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.runtime.closing import Closing

#: Seconds within which all copies have to have all WAL.
_PATIENCE = 120.0
_POLL = 0.02


class Side(Closing):
    """Started when it is created; commits wait for it from `attach` until `detach`."""

    name = ""
    #: `synchronous_standby_names`, and how many standbys the server shows.
    names = ""
    standbys = 3

    def __init__(self, server: LocalServer) -> None:
        self.server = server

    @abstractmethod
    def pids(self) -> list[int]:
        """Its processes, without the server's walsenders."""

    @abstractmethod
    def differs(self) -> str | None:
        """How its WAL differs from the primary's; None if it does not."""

    def attach(self) -> None:
        """Make commits wait for it. It has all WAL when this returns.

        It has to be there first: safekeepers that are new form no quorum on a server whose commits wait for one.
        """
        self._wait("SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'")
        execute(self.server, f"ALTER SYSTEM SET synchronous_standby_names = '{self.names}'")
        execute(self.server, "SELECT pg_reload_conf()")
        wanted = (
            f"SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum') AND \
flush_lsn >= '{ask(self.server, 'SELECT pg_current_wal_flush_lsn()')}'"
        )
        self._wait(wanted)

    def _wait(self, wanted: str) -> None:
        """Wait until all standbys of this side are attached."""
        deadline = time.monotonic() + _PATIENCE
        while int(ask(self.server, wanted)) < self.standbys:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.name} is not there: {self.server.log_tail()}")
            time.sleep(_POLL)

    def cpu(self) -> float:
        """CPU seconds so far: its processes, and the walsenders that serve it."""
        senders = ask(self.server, "SELECT string_agg(pid::text, ' ') FROM pg_stat_replication")
        pids = [*self.pids()]
        return sum(map(tree_cpu_seconds, pids)) + sum(map(cpu_seconds, map(int, senders.split())))

    def detach(self) -> None:
        """Commits no longer wait for it."""
        execute(self.server, "ALTER SYSTEM RESET synchronous_standby_names")
        execute(self.server, "SELECT pg_reload_conf()")


class Own(Side):
    """Three safekeepers and their proposer."""

    name = "own"
    names = f"ANY 1 ({NAME})"
    standbys = 1

    def __init__(self, server: LocalServer, folder: Path) -> None:
        super().__init__(server)
        folder.mkdir()
        self.stack = QuorumStack(folder, server)
        self.prepare(folder)
        self.stack.start()

    def prepare(self, folder: Path) -> None:
        """What is different in the processes' settings."""

    def pids(self) -> list[int]:
        """See `Side`."""
        return [process.pid for process in self.stack.processes.values()]

    def differs(self) -> str | None:
        """Complete segments, byte for byte."""
        folders = [self.stack.data(number) / "wal" for number in range(3)]
        return _segments_differ(self.server, folders)

    def close(self) -> None:
        """End the processes, remove the slot."""
        self.stack.__exit__()
        drop_slots(self.server)


class OwnTls(Own):
    """The same, with mutual TLS between proposer and safekeepers."""

    name = "own-tls"

    def prepare(self, folder: Path) -> None:
        """A certificate for each kind of process."""
        authority = Authority(folder)
        safekeeper = authority.issue("safekeeper", hosts=HOSTS)
        self.stack.options = {name: {"tls": safekeeper} for name in self.stack.names}
        self.stack.options["proposer"] = {"tls": authority.issue("proposer")}


class Receivers(Side):
    """Three `pg_receivewal --synchronous`."""

    name = "receivers"
    names = "ANY 2 (r0, r1, r2)"

    def __init__(self, server: LocalServer, folder: Path) -> None:
        super().__init__(server)
        self._folders = [folder / f"r{number}" for number in range(3)]
        self._processes = []
        for number, place in enumerate(self._folders):
            place.mkdir(parents=True)
            dsn = server.dsn("postgres", application_name=f"r{number}")
            command = [str(server.installation.tool("pg_receivewal")), "-D", str(place), "-d", dsn]
            self._processes.append(
                subprocess.Popen(
                    [*command, "--synchronous", "--no-loop"], stderr=subprocess.DEVNULL
                )
            )

    def pids(self) -> list[int]:
        """See `Side`."""
        return [process.pid for process in self._processes]

    def differs(self) -> str | None:
        """Complete segments, byte for byte."""
        return _segments_differ(self.server, self._folders)

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.send_signal(signal.SIGINT)
        for process in self._processes:
            process.wait(20)


class Standbys(Side):
    """Three hot standbys."""

    name = "standbys"
    names = "ANY 2 (s0, s1, s2)"

    def __init__(self, server: LocalServer, folder: Path) -> None:
        super().__init__(server)
        self._made = []
        for number in range(3):
            place = folder / f"s{number}"
            if not place.exists():
                _base_backup(server, place)
            self._made.append(_Standby(server, place, f"s{number}"))

    def pids(self) -> list[int]:
        """See `Side`."""
        return [standby.pid for standby in self._made]

    def differs(self) -> str | None:
        """All standbys have replayed WAL up to the primary's position, as they report themselves."""
        end = ask(self.server, "SELECT pg_current_wal_flush_lsn()")
        deadline = time.monotonic() + _PATIENCE
        question = f"SELECT count(*) FROM pg_stat_replication WHERE replay_lsn >= '{end}'"
        while int(ask(self.server, question)) < 3:
            if time.monotonic() > deadline:
                return f"standbys have not replayed to {end}"
            time.sleep(_POLL)
        return None

    def close(self) -> None:
        """Stop them; their data stays for the next round."""
        for standby in self._made:
            standby.stop()


class _Standby:
    def __init__(self, server: LocalServer, place: Path, name: str) -> None:
        (place / "standby.signal").touch()
        port = free_port()
        dsn = server.dsn("postgres", application_name=name).replace("'", "''")
        lines = [
            f"primary_conninfo = '{dsn}'",
            f"port = {port}",
            "listen_addresses = '127.0.0.1'",
            f"unix_socket_directories = '{place}'",
            "synchronous_standby_names = ''",
        ]
        account = server_account()
        (place / "postgresql.auto.conf").write_text("\n".join(lines) + "\n")
        self._tool = server.installation.reachable(account).tool("pg_ctl")
        self._place, self._account = place, account
        account.run([self._tool, "-D", place, "-w", "-l", place / "log", "start"])
        self.pid = int((place / "postmaster.pid").read_text().split()[0])

    def stop(self) -> None:
        self._account.run([self._tool, "-D", self._place, "-m", "immediate", "stop"])


def _base_backup(server: LocalServer, place: Path) -> None:
    account = server_account()
    account.make_folder(place)
    tool = server.installation.reachable(account).tool("pg_basebackup")
    account.run([tool, "-D", place, "-d", server.dsn(), "-c", "fast", "-X", "stream"])


def _segments_differ(server: LocalServer, folders: list[Path]) -> str | None:
    """Compare complete segments with the primary's; at least two of three copies have each of them."""
    execute(server, "SELECT pg_switch_wal()")
    last = ask(server, "SELECT pg_walfile_name(pg_current_wal_flush_lsn() - 1)")
    execute(server, "CREATE TABLE IF NOT EXISTS behind_the_switch (number int)")
    deadline = time.monotonic() + _PATIENCE
    while sum((folder / last).exists() for folder in folders) < 2:
        if time.monotonic() > deadline:
            return f"two copies do not have {last}"
        time.sleep(_POLL)
    found = 0
    for folder in folders:
        for path in folder.iterdir():
            own = server.data_dir / "pg_wal" / path.name
            if len(path.name) == 24 and own.exists():
                found += 1
                if own.read_bytes() != path.read_bytes():
                    return f"{path} is not the primary's"
    return None if found else "no segment to compare"


def ask(server: LocalServer, question: str) -> str:
    """The first column of the first row."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("SET synchronous_commit = local")
        row = connection.execute(question.encode()).fetchone()
        return "" if row is None or row[0] is None else str(row[0])


def execute(server: LocalServer, statement: str) -> None:
    """Run a statement that waits for no standby."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("SET synchronous_commit = local")
        connection.execute(statement.encode())


def lsn(server: LocalServer) -> int:
    """The primary's durable end of WAL."""
    return parse_lsn(ask(server, "SELECT pg_current_wal_flush_lsn()"))


def drop_slots(server: LocalServer) -> None:
    """Release all WAL."""
    execute(
        server,
        "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active",
    )


def most_memory(pid: int) -> float:
    """The most resident memory that a process has had, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


#: The folder of a benchmark's servers. On a disk: on a file system in memory, durability costs nothing.
PLACE = os.environ.get("TUSKLINE_BENCH_FOLDER")
