"""A safekeeper's folder as its hot loop would hold it, filled from a real server, and the WAL server beside it."""

import base64
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Protocol, Self

import psycopg
from psycopg.conninfo import make_conninfo
from scramp import ScramMechanism

from tests.support.child import start_child
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer, by_major, free_port
from walsender_bridge.postgres.protocol.lsn import parse_lsn
from walsender_bridge.postgres.protocol.replication import ServerTimelines, parse_history
from walsender_bridge.postgres.protocol.wal_page import segment_name, segment_start
from walsender_bridge.quorum.protocol.positions import Positions
from walsender_bridge.quorum.protocol.shared_page import PositionWriter
from walsender_bridge.quorum.wal_server.settings import WalServerSettings
from walsender_bridge.quorum.wal_server.wal_folder import PARTIAL

USER, PASSWORD = "reader", "the reader's secret: Xyzzy-4711"
#: What stands behind the position in a segment: never to be seen by a reader.
GARBAGE = b"\xa5"


def verifier(password: str) -> str:
    """PostgreSQL's text of a password's SCRAM verifier."""
    salt, stored, server, count = ScramMechanism("SCRAM-SHA-256").make_auth_info(password)
    b64 = [base64.b64encode(each).decode() for each in (salt, stored, server)]
    return f"SCRAM-SHA-256${count}:{b64[0]}${b64[1]}:{b64[2]}"


def keep_wal(major: int) -> dict[str, str]:
    """Settings of a server that keeps its WAL long enough to be copied."""
    return {"wal_keep_size": "1GB"} if major >= 13 else {"wal_keep_segments": "64"}


def current_lsn(server: LocalServer) -> int:
    """Up to where the server has its WAL on disk."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        found = connection.execute(
            "SELECT CASE WHEN pg_is_in_recovery() THEN pg_last_wal_receive_lsn()"
            " ELSE pg_current_wal_flush_lsn() END"
        ).fetchone()
    assert found is not None
    return parse_lsn(found[0])


def run(server: LocalServer, *statements: str) -> list[Any]:
    """Statements in autocommit; the rows of the last one."""
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


class HeldWal:
    """The folder, and the positions that the hot loop tells. `end` is where the folder's WAL ends."""

    def __init__(self, folder: Path, server: LocalServer) -> None:
        self.folder = folder / "wal"
        self.folder.mkdir()
        self.page = folder / "positions"
        self._writer = PositionWriter(self.page)
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            row = connection.execute(
                "SELECT system_identifier, current_setting('wal_segment_size')"
                " FROM pg_control_system()"
            ).fetchone()
        assert row is not None
        self.system_id = row[0] & (2**64 - 1)
        number, unit = re.fullmatch(r"(\d+)(MB|GB)", row[1]).groups()  # type: ignore[union-attr]
        self.segment_bytes = int(number) << {"MB": 20, "GB": 30}[unit]
        self.major = server.installation.major
        self.history = ServerTimelines(1)
        names = sorted(p.name for p in (server.data_dir / "pg_wal").iterdir() if len(p.name) == 24)
        high, low = int(names[0][8:16], 16), int(names[0][16:], 16)
        self.start = self.end = (high << 32) + low * self.segment_bytes
        self.position = 0

    def take(self, server: LocalServer, upto: int | None = None) -> int:
        """Copy the server's WAL from `end` up to `upto` (what it has flushed)."""
        upto = current_lsn(server) if upto is None else upto
        while self.end < upto:
            name = segment_name(self.history.timeline, self.end, self.segment_bytes)
            offset = self.end % self.segment_bytes
            size = min(upto - self.end, self.segment_bytes - offset)
            source = server.data_dir / "pg_wal" / name
            partial = self.folder / (name + PARTIAL)
            if not partial.exists():
                partial.write_bytes(GARBAGE * self.segment_bytes)
            with source.open("rb") as read, partial.open("r+b") as write:
                read.seek(offset)
                write.seek(offset)
                data = read.read(size)
                assert len(data) == size
                write.write(data)
            self.end += size
            if self.end % self.segment_bytes == 0:
                partial.rename(self.folder / name)
        return self.end

    def publish(self, commit: int | None = None, flush: int | None = None) -> int:
        """Tell the positions: both are the end of the WAL unless they are given. What is served now."""
        flush = self.end if flush is None else flush
        positions = Positions(
            self.system_id,
            self.major,
            self.segment_bytes,
            self.history,
            flush,
            self.end if commit is None else commit,
        )
        self._writer.publish(positions)
        self.position = positions.served_lsn
        return self.position

    def switch_to(self, server: LocalServer) -> int:
        """Go on with a promoted server's timeline; where it forked. Its history is there before it is told."""
        timeline = int(run(server, "SELECT pg_walfile_name(pg_current_wal_lsn())")[0][0][:8], 16)
        source = server.data_dir / "pg_wal" / f"{timeline:08X}.history"
        text = source.read_text()
        shutil.copyfile(source, self.folder / source.name)
        self.history = parse_history(timeline, text)
        fork = self.history.ancestors[-1][1]
        assert fork <= self.end
        # The new timeline's file of the segment begins with the old one's bytes.
        self.end = segment_start(fork, self.segment_bytes)
        self.take(server, fork)
        return fork

    def bytes_of(self, name: str) -> bytes:
        """A segment, complete or not."""
        whole = self.folder / name
        return (whole if whole.exists() else self.folder / (name + PARTIAL)).read_bytes()

    def readers(self):
        """What the hot loop hears of the readers."""
        return self._writer.readers()

    def close(self) -> None:
        self._writer.close()


class Held(Protocol):
    """What a WAL server serves: the folder with the WAL, and the page of its positions."""

    folder: Path
    page: Path


class WalServerProcess:
    """The WAL server as a process."""

    def __init__(self, folder: Path, held: Held | None, **options: Any) -> None:
        self.folder = folder
        self.port = free_port()
        self.users = folder / "users"
        self.users.touch(mode=0o600)
        self.users.write_text(f'"{USER}" "{verifier(PASSWORD)}"\n')
        self.log_file = folder / "wal-server.log"
        self.slots = folder / "slots"
        wal = held.folder if held else folder
        page = held.page if held else folder / "positions"
        self._settings = WalServerSettings(
            wal, page, self.slots, self.users, "127.0.0.1", self.port, **options
        )
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        before = self.log.count("serving WAL")
        process = start_child(
            "walsender_bridge.quorum.wal_server", self._settings, log=self.log_file
        )
        self.process = process
        try:
            wait_for(
                lambda: self.log.count("serving WAL") > before or process.poll() is not None,
                30,
                "the WAL server serves",
            )
            assert process.poll() is None, self.log
        except AssertionError:
            self.kill()
            raise

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(20)
        self.process = None
        return code

    @property
    def log(self) -> str:
        return self.log_file.read_text() if self.log_file.exists() else ""

    def dsn(self, **parameters: str | int) -> str:
        base: dict[str, str | int] = {
            "host": "127.0.0.1",
            "port": self.port,
            "user": USER,
            "password": PASSWORD,
            "replication": "true",
            "sslmode": "prefer",
        }
        return make_conninfo("", **(base | parameters))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        print(self.log[-4000:])


class Receivers:
    """Makes receivers, and ends them all."""

    def __init__(self) -> None:
        self._made: list[Receiver] = []

    def __call__(self, server: LocalServer, dsn: str, folder: Path, *options: str) -> "Receiver":
        self._made.append(Receiver(server, dsn, folder, *options))
        return self._made[-1]

    def end(self) -> None:
        for receiver in self._made:
            print(receiver.stop())


class Receiver:
    """A real `pg_receivewal` that runs until `stop`."""

    def __init__(self, server: LocalServer, dsn: str, folder: Path, *options: str) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.log_file = folder.with_name(folder.name + ".log")
        program = client_tool(server, "pg_receivewal")
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [program, "-D", folder, "-d", dsn, "--no-password", *options],
                stdout=log,
                stderr=log,
                env=plain_environment(),
            )

    def held(self, name: str) -> bytes | None:
        """A segment that it has received, complete or not; of the latter, what it has not is zero."""
        for path in (self.folder / name, self.folder / (name + PARTIAL)):
            if path.exists():
                return path.read_bytes()
        return None

    def has(self, held: HeldWal, upto: int) -> bool:
        """Whether it has all of the folder's WAL up to `upto` of the current timeline."""
        size = held.segment_bytes
        name = segment_name(held.history.timeline, upto - 1, size)
        got = self.held(name)
        part = (upto - 1) % size + 1
        return got is not None and got[:part] == held.bytes_of(name)[:part]

    def check(self, held: HeldWal, upto: int) -> None:
        """Everything up to `upto` is byte for byte what the folder has, and there is nothing behind it."""
        size = held.segment_bytes
        for path in sorted(self.folder.iterdir()):
            name = path.name.removesuffix(PARTIAL)
            if len(name) != 24:
                continue
            timeline = int(name[:8], 16)
            begin = (int(name[8:16], 16) << 32) + int(name[16:], 16) * size
            end = held.history.end_of(timeline)
            assert end is not None, name
            part = max(0, min(size, upto - begin, end - begin))
            got = path.read_bytes()
            assert got[:part] == held.bytes_of(name)[:part], f"{name} differs"
            assert not got[part:].strip(b"\0"), f"{name} goes on behind the position"

    def stop(self) -> str:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(20)
        return self.log_file.read_text()


def plain_environment() -> dict[str, str]:
    """The environment without settings that libpq takes from it."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PG")} | {"LC_ALL": "C"}


def client_tool(server: LocalServer, name: str) -> Path:
    """A client program of the server's installation, or of a newer one here: those serve older servers, too."""
    found = by_major()
    for major in [server.installation.major, *sorted(found, reverse=True)]:
        installation = found[major]
        if (installation.bin_dir / name).exists():
            return installation.reachable(server._account).tool(name)
    return server.installation.tool(name)


def make_standby(origin: LocalServer, folder: Path, upstream: str, **settings: str) -> LocalServer:
    """A standby from a base backup of `origin` that streams from `upstream` (a libpq connection string)."""
    standby = backup(origin, folder, **settings)
    follow(standby, upstream)
    return standby


def backup(origin: LocalServer, folder: Path, *, wal: str = "none", **settings: str) -> LocalServer:
    """A base backup of `origin` as a server that was never started. `wal`: as `pg_basebackup -X` takes it."""
    account = origin._account
    account.make_folder(folder, 0o755)
    made = LocalServer(origin.installation, account, folder, origin._password)
    account.run(
        [
            *(client_tool(origin, "pg_basebackup"), "-D", made.data_dir, "-X", wal),
            *("-c", "fast", "--no-sync", "-d", origin.dsn(replication="true")),
        ]
    )
    with (made.data_dir / "postgresql.conf").open("a") as conf:
        conf.writelines(f"{name} = '{value}'\n" for name, value in settings.items())
    return made


def follow(standby: LocalServer, upstream: str, **settings: str) -> None:
    """Make a stopped server a standby of `upstream`."""
    lines = {
        "primary_conninfo": upstream.replace("\\", "\\\\").replace("'", "''"),
        "recovery_target_timeline": "latest",
        "wal_retrieve_retry_interval": "200ms",
        "wal_receiver_status_interval": "1s",
        **settings,
    }
    file = "postgresql.conf" if standby.installation.major >= 12 else "recovery.conf"
    if file == "recovery.conf":
        own = {
            "wal_retrieve_retry_interval",
            "wal_receiver_status_interval",
            "hot_standby_feedback",
        }
        with (standby.data_dir / "postgresql.conf").open("a") as conf:
            conf.writelines(f"{name} = '{lines.pop(name)}'\n" for name in own & set(lines))
        lines["standby_mode"] = "on"
    else:
        (standby.data_dir / "standby.signal").touch()
    with (standby.data_dir / file).open("a") as conf:
        conf.writelines(f"{name} = '{value}'\n" for name, value in lines.items())
    owner = standby.data_dir.stat()
    # 11 renames it, and syncs it before.
    os.chown(standby.data_dir / file, owner.st_uid, owner.st_gid)


def promote(standby: LocalServer) -> None:
    """Have a standby take writes, and wait until it does. SQL cannot do it before 12."""
    account = standby._account
    tool = standby.installation.reachable(account).tool("pg_ctl")
    account.run([tool, "promote", "-w", "-D", standby.data_dir])


def replayed(server: LocalServer) -> int:
    """Up to where a standby has replayed."""
    found = run(server, "SELECT pg_last_wal_replay_lsn()")[0][0]
    return parse_lsn(found) if found else 0
