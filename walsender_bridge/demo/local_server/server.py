"""A local PostgreSQL server, in its own folder, on 127.0.0.1.

It ends with its owner: a guard (a shell with the server's account) waits on a pipe whose other end only the owner's process
has. If the pipe is closed without a line, because the owner died, the guard stops the server immediately (`immediate`: the
next start recovers). Server and guard have sessions of their own, so Ctrl-C at a terminal reaches only the owner, which
then decides.

A cluster is created once for each version and copied: `initdb` takes seconds, a copy a tenth of a second.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Self

from psycopg.conninfo import make_conninfo

from walsender_bridge.demo.local_server import shared_memory
from walsender_bridge.demo.local_server.account import Account, reachable_place, server_account
from walsender_bridge.demo.local_server.installation import Installation
from walsender_bridge.errors import LocalServerError
from walsender_bridge.runtime import cache as local_cache
from walsender_bridge.runtime import processes

Progress = Callable[[str], None]
StopMode = Literal["smart", "fast", "immediate"]

SUPERUSER = "postgres"
DEFAULTS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "wal_level": "logical",
    "max_wal_senders": "20",
    "max_replication_slots": "20",
    "lc_messages": "C",
    "log_line_prefix": "%m [%p] %q%u@%d ",
    # In the data folder, so that the remains of a killed server are deleted with it.
    "dynamic_shared_memory_type": "mmap",
}
_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
# A line on the pipe: exit. End of file: the owner died. The pid may then belong to another process.
_GUARD = 'read -r _ && exit; [ "$(head -n 1 "$2/postmaster.pid")" = "$1" ] && kill -QUIT "$1"'
# Below the range of ephemeral ports, so that a stopped server gets its port again.
_PORTS = "12000-31999"
_given: set[int] = set()
_ATTEMPTS = 20
_BLOCK = 64 << 10


def free_port() -> int:
    """A free TCP port of 127.0.0.1, outside the range of ephemeral ports; `TUSKLINE_PORTS` (first-last) is another range.

    A process gets each port once, since it may not be bound yet when the next one is requested. Processes that run at the
    same time and restart their servers need ranges of their own: a stopped server's port looks free to the others.
    """
    ports = _ports()
    if len(_given) > len(ports) // 2:
        _given.clear()
    for _ in range(200):
        port = secrets.choice(ports)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port
    raise LocalServerError("no free port", where=_where(ports))


def free_ports(count: int) -> range:
    """This number of consecutive free ports, in the range of `free_port`."""
    ports = _ports()
    for _ in range(200):
        first = free_port()
        row = range(first, first + count)
        if row.stop <= ports.stop and _given.isdisjoint(row[1:]) and all(map(_is_free, row)):
            _given.update(row)
            return row
    raise LocalServerError(f"no {count} free ports in a row", where=_where(ports))


def _ports() -> range:
    text = os.environ.get("TUSKLINE_PORTS", _PORTS)
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16):
        raise LocalServerError(
            f"not a range of ports: {text!r}",
            where="TUSKLINE_PORTS",
            repair=f"set it to first-last, for instance {_PORTS}",
        )
    return range(int(first), int(last) + 1)


def _where(ports: range) -> str:
    return f"127.0.0.1:{ports.start}-{ports.stop - 1}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _silent(_: str) -> None:
    pass


class LocalServer:
    """A server that was created with `create`; as a context manager, it runs inside the block.

    `data_dir` is PostgreSQL's data folder, `log_file` its log, `port` stays the same over
    restarts. The superuser is `postgres`.
    """

    def __init__(
        self, installation: Installation, account: Account, folder: Path, password: str
    ) -> None:
        self.installation = installation
        self.folder = folder
        self.data_dir = folder.resolve() / "data"
        self.log_file = folder.resolve() / "server.log"
        self.port = free_port()
        self._account = account
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @classmethod
    def create(
        cls,
        installation: Installation,
        folder: Path,
        *,
        settings: Mapping[str, str] | None = None,
        auth: Literal["scram", "trust"] = "scram",
        template_cache: Path | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Create a server in `folder`, which must not exist yet or be empty. It is not started.

        `settings` go over `DEFAULTS` into postgresql.conf (`{"fsync": "off"}` where no power is cut).
        `auth` holds for every connection; with `scram` the superuser has a random password, which `dsn`
        knows. `template_cache` is where fresh clusters are kept. If the server's account cannot enter
        `folder`, the data lies elsewhere and `folder` is a symbolic link to it. Raises `LocalServerError`.
        """
        report = progress or _silent
        account = server_account()
        installation = installation.reachable(account)
        place = template_cache or reachable_place(account) / "clusters"
        template, password = _template(installation, account, place, report)
        home = _home(folder, account)
        report(f"PostgreSQL {installation.version}: copying a fresh cluster to {home}")
        account.run(["cp", "-Rp", template, home / "data"])
        server = cls(installation, account, folder, password)
        lines = [
            f"{name} = '{value.replace(chr(39), chr(39) * 2)}'"
            for name, value in (DEFAULTS | dict(settings or {})).items()
        ]
        with (server.data_dir / "postgresql.conf").open("a") as conf:
            conf.write("\n" + "\n".join(lines) + "\n")
        if auth == "trust":
            hba = server.data_dir / "pg_hba.conf"
            hba.write_text(hba.read_text().replace("scram-sha-256", "trust"))
        return server

    def copied(self, folder: Path) -> "LocalServer":
        """Create a server in `folder` from a base backup of this running server. It is not started."""
        home = _home(folder, self._account)
        backup = LocalServer(self.installation, self._account, folder, self._password)
        self._account.run(
            [
                *(self.installation.tool("pg_basebackup"), "-D", home / "data", "-X", "fetch"),
                *("-c", "fast", "--no-sync", "-d", self.dsn(replication="true")),
            ]
        )
        return backup

    @property
    def running(self) -> bool:
        """Whether the server's process exists."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The postmaster's process id. Raises `LocalServerError` if the server is not running."""
        if self._process is None or not self.running:
            raise self._error("the server is not running")
        return self._process.pid

    def dsn(self, dbname: str = "postgres", **parameters: str | int) -> str:
        """A libpq connection string for the superuser, including the password. Not for logs."""
        base: dict[str, str | int] = {
            "host": "127.0.0.1",
            "port": self.port,
            "user": SUPERUSER,
            "password": self._password,
            "dbname": dbname,
        }
        return make_conninfo("", **(base | parameters))

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the server's log."""
        try:
            return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-lines:])
        except FileNotFoundError:
            return ""

    def start(self, *, timeout: float = 60.0) -> None:
        """Start the server and wait until it accepts connections, at most `timeout` seconds.

        A start after `kill` recovers first. If something else took the port meanwhile and the server has
        never run, another port is taken. Raises `LocalServerError` with the end of the log.
        """
        if self.running:
            return
        never_ran = not self.log_file.exists()
        for attempt in range(_ATTEMPTS):
            self._launch()
            if self._wait_ready(time.monotonic() + timeout):
                return
            busy = "could not bind" in self.log_tail()
            self.kill()
            if not (busy and never_ran) or attempt == _ATTEMPTS - 1:
                break
            self.port = free_port()
        raise self._error("PostgreSQL did not start")

    def _launch(self) -> None:
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [self.installation.tool("postgres"), "-D", self.data_dir, "-p", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._account.options(),
            )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", str(self._process.pid), str(self.data_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **self._account.options(),
        )

    def _wait_ready(self, deadline: float) -> bool:
        """Whether it became ready: the postmaster writes its status into line 8 of postmaster.pid (miscadmin.h).

        The file is polled, as pg_ctl does; there is no event to wait for.
        """
        assert self._process is not None
        state = self.data_dir / "postmaster.pid"
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            with contextlib.suppress(FileNotFoundError):
                lines = state.read_text().splitlines()
                mine = len(lines) >= 8 and lines[0] == str(self._process.pid)
                if mine and lines[7].strip() == "ready":
                    return True
            time.sleep(0.02)
        return False

    def stop(self, mode: StopMode = "fast", *, timeout: float = 60.0) -> None:
        """Stop the server as `pg_ctl stop -m` does; kill it if that takes longer than `timeout`."""
        if self._process is not None and self.running:
            self._process.send_signal(_SIGNALS[mode])
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise self._error(f"PostgreSQL did not stop in {timeout:g} s ({mode})") from None
        self._release()

    def kill(self) -> None:
        """End the postmaster and all its children with SIGKILL, like a power failure. `start` recovers."""
        if self._process is not None:
            processes.kill_tree(self._process.pid)
            self._process.wait()
        self._release()

    def _release(self) -> None:
        """End the guard process."""
        self._process = None
        if self._guard is not None:
            with contextlib.suppress(BrokenPipeError):
                self._guard.communicate(b"go\n")
            self._guard = None

    def restart(self, mode: StopMode = "fast", *, timeout: float = 60.0) -> None:
        """Stop and start, on the same port."""
        self.stop(mode, timeout=timeout)
        self.start(timeout=timeout)

    def destroy(self) -> None:
        """Stop the server immediately, and delete its folder."""
        # Not SIGKILL: a postmaster that ends by itself takes its shared memory with it.
        with contextlib.suppress(LocalServerError):
            self.stop("immediate", timeout=10.0)
        shared_memory.release(self.data_dir)
        shutil.rmtree(self.folder.resolve(), ignore_errors=True)
        if self.folder.is_symlink():
            self.folder.unlink()

    def _error(self, what: str) -> LocalServerError:
        tail = self.log_tail()
        return LocalServerError(
            f"{what}; its log ends with:\n{tail}" if tail else what,
            where=f"PostgreSQL {self.installation.version} in {self.data_dir}",
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _home(folder: Path, account: Account) -> Path:
    """`folder`, created and given to the account; or a place that it can enter, with `folder` as a link to it."""
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if folder.exists():
        raise LocalServerError("the folder is not empty", where=str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    if account.may("x", folder.parent):
        return account.make_folder(folder, 0o755)
    servers = reachable_place(account) / "servers"
    servers.mkdir(exist_ok=True)
    elsewhere = Path(tempfile.mkdtemp(prefix=f"{folder.name}-", dir=servers))
    elsewhere.rmdir()
    account.make_folder(elsewhere, 0o755)
    folder.symlink_to(elsewhere)
    return elsewhere


def _template(
    installation: Installation, account: Account, place: Path, report: Progress
) -> tuple[Path, str]:
    """A fresh cluster of this version to copy from, and its superuser's password."""
    target = place / f"{installation.key}-{account.uid}"
    secret = target.with_name(f"{target.name}.password")
    with local_cache.exclusive(target):
        if target.is_dir() and secret.is_file():
            return target, secret.read_text()
        report(f"PostgreSQL {installation.version}: initdb (once for each version)")
        password = secrets.token_urlsafe(24)
        shutil.rmtree(target, ignore_errors=True)
        aside = target.with_name(f".{target.name}.new")
        shutil.rmtree(aside, ignore_errors=True)
        account.make_folder(aside)
        # A pipe of ours would be closed to the account, which opens the file by its name.
        shown = aside.with_name(f"{aside.name}.password")
        shown.unlink(missing_ok=True)
        shown.touch(mode=0o600)
        shown.write_text(password + "\n")
        if account.switched:
            os.chown(shown, account.uid, account.gid)
        try:
            account.run(
                [
                    installation.tool("initdb"),
                    *("-D", aside, "-U", SUPERUSER, "-E", "UTF8", "--locale=C", "--no-sync"),
                    *("--auth=scram-sha-256", f"--pwfile={shown}"),
                ]
            )
        finally:
            shown.unlink()
        for segment in (aside / "pg_wal").glob("0*"):
            _make_sparse(segment)
        secret.touch(mode=0o600)
        secret.write_text(password)
        aside.rename(target)
        return target, password


def _make_sparse(file: Path) -> None:
    """Turn blocks of zeros, most of a fresh cluster's WAL, into holes: `cp` copies the cluster for a third less."""
    data = memoryview(file.read_bytes())
    with file.open("r+b") as target:
        target.truncate(0)
        for at in range(0, len(data), _BLOCK):
            block = data[at : at + _BLOCK]
            if any(block):
                target.seek(at)
                target.write(block)
        target.truncate(len(data))
