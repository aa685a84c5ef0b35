"""PgBouncer in transaction mode before a test's server: the installed one, or Debian's, unpacked once without installing it."""

import contextlib
import functools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from tests.support.servers import Database
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import free_port

_UNPACKED: Final = Path(f"/var/tmp/tuskline-{os.getuid()}/pgbouncer")  # noqa: S108  # as for other majors
_PACKAGES: Final = ("pgbouncer", "libevent-2.1-7", "libc-ares2")


@functools.cache
def command() -> tuple[str, ...]:
    """How it is started; empty if it cannot be had. Where `apt-get` knows it, it is unpacked into a folder of this account."""
    if installed := shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
        return (installed,)
    program = _UNPACKED / "usr/sbin/pgbouncer"
    if not program.exists() and not _unpack():
        return ()
    libraries = {each.parent for each in _UNPACKED.glob("usr/lib/**/*.so.*")}
    return ("env", f"LD_LIBRARY_PATH={':'.join(map(str, libraries))}", str(program))


def _unpack() -> bool:
    _UNPACKED.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_UNPACKED.parent) as folder:
        Path(folder).chmod(0o755)
        try:
            subprocess.run(
                ["apt-get", "download", *_PACKAGES], cwd=folder, check=True, capture_output=True
            )
            for package in Path(folder).glob("*.deb"):
                subprocess.run(["dpkg-deb", "--extract", package, f"{folder}/new"], check=True)
        except (OSError, subprocess.CalledProcessError):
            return False
        Path(folder, "new").chmod(0o755)
        with contextlib.suppress(OSError):  # another worker was first
            Path(folder, "new").rename(_UNPACKED)
    return True


def described() -> str:
    """Which one tests use."""
    return " ".join(command()[-1:]) or "not here: install pgbouncer"


@contextlib.contextmanager
def transaction_pool(database: Database, size: int) -> Iterator[str]:
    """The DSN of a pool of at most `size` server connections; a session has one for the time of a transaction."""
    if not command():
        pytest.skip("PgBouncer is neither installed nor to be had from apt-get")
    server = conninfo_to_dict(database.dsn)
    port = free_port()
    account = "nobody" if os.geteuid() == 0 else pwd.getpwuid(os.geteuid()).pw_name
    with tempfile.TemporaryDirectory(prefix="tuskline-test-") as folder:
        Path(folder).chmod(0o755)
        settings = Path(folder, "pgbouncer.ini")
        settings.write_text(
            f"""[databases]
{database.name} = host=127.0.0.1 port={server["port"]} dbname={database.name} user={server["user"]} password={server["password"]}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {size}
"""
        )
        with subprocess.Popen(
            [*command(), str(settings)],
            user=account if os.geteuid() == 0 else None,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            try:
                dsn = make_conninfo(
                    host="127.0.0.1", port=port, dbname=database.name, user="anyone"
                )
                wait_for(lambda: _answers(dsn), 20, "PgBouncer answers")
                yield dsn
            finally:
                process.kill()


def _answers(dsn: str) -> bool:
    try:
        with psycopg.connect(dsn, autocommit=True, prepare_threshold=None) as connection:
            connection.execute("SELECT 1")
    except psycopg.OperationalError:
        return False
    return True
