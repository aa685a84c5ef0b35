"""A part that runs already, a port that is taken, a folder that cannot be used: one sentence, its exit code, no traceback."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.parts_config import configuration
from tests.support.small_disk import mounted
from tests.support.waiting import wait_for
from walsender_bridge.cli import lake_run, parts
from walsender_bridge.cli.app import app
from walsender_bridge.config import Config, load_config
from walsender_bridge.errors import Cause, RunningError, TusklineError
from walsender_bridge.runtime import pid_file, supervisor

PARTS = ("log-server", "bridge", "lake")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by no supervisor, and nobody waits for one that was killed."""
    monkeypatch.setattr(supervisor, "exit_with_parent", lambda: None)
    monkeypatch.setattr(parts, "_GONE_SECONDS", 0.0)
    monkeypatch.setattr(parts, "CLOSED_SECONDS", 0.0)


def refused(config: Path, *words: str) -> TusklineError:
    """The error that ends a command, which has started nothing."""
    error = CliRunner().invoke(app, [*words, "-c", str(config)]).exception
    assert isinstance(error, TusklineError), error
    assert error.repair
    assert "\n" not in error.what
    for name in ("up", *PARTS):
        assert not (load_config(config).run_dir / f"{name}.json").exists()
    return error


@contextlib.contextmanager
def taken(address: str) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        yield


def places(settings: Config) -> list[tuple[str, Path]]:
    assert settings.lake is not None
    return [
        *((part, settings.run_dir) for part in PARTS),
        ("log-server", settings.hosted_log_servers[0].data_dir),
        ("lake", lake_run.place(settings.lake.uri)),
    ]


@pytest.mark.parametrize("number", range(5))
def test_a_second_part_is_refused_with_the_pid_and_start_of_the_first(
    tmp_path: Path, number: int
) -> None:
    config = configuration(tmp_path, lake=True)
    part, folder = places(load_config(config))[number]
    with pid_file.held(folder, part):
        error = refused(config, part, "run")
    assert isinstance(error, RunningError)
    assert (
        f"`tuskline {part} run` is already running, as process {os.getpid()} since 20" in error.what
    )
    assert error.where == str(folder)
    assert error.repair.startswith(f"tuskline down, or end process {os.getpid()}")


@pytest.mark.parametrize("number", range(4))
def test_up_is_refused_beside_a_part_that_runs_by_itself(tmp_path: Path, number: int) -> None:
    config = configuration(tmp_path, lake=True)
    part, folder = places(load_config(config))[number]
    with pid_file.held(folder, part):
        error = refused(config, "up")
    assert isinstance(error, RunningError)
    assert f"`tuskline {part} run` is already running, as process {os.getpid()}" in error.what


def test_a_second_log_server_process_leaves_the_first_as_it_is(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    run_dir = load_config(config).run_dir
    command = [
        sys.executable,
        "-m",
        "walsender_bridge.cli.app",
        "log-server",
        "run",
        "-c",
        str(config),
    ]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as first:
        try:
            wait_for((run_dir / "log-server.json").exists, 60, "the first one runs")
            second = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert second.returncode == Cause.RUNNING
            assert f"as process {first.pid} since" in second.stderr
            assert "Traceback" not in second.stderr
            assert supervisor.read_states(run_dir, "log-server").pid == first.pid
        finally:
            first.terminate()
    assert pid_file.owner(run_dir, "log-server") is None


@pytest.mark.parametrize(
    ("command", "part"),
    [("log-server run", "log-server"), ("bridge run", "log"), ("up", "log-server"), ("up", "log")],
)
def test_a_taken_port_is_named(tmp_path: Path, command: str, part: str) -> None:
    config = configuration(tmp_path)
    settings = load_config(config)
    address = settings.log.listen if part == "log" else settings.log_server[0].listen
    with taken(address):
        error = refused(config, *command.split())
    assert (error.cause, error.where) == (Cause.CONFIG, address)
    assert error.what == "cannot listen: Address already in use"


def test_up_in_the_background_ends_with_the_error_of_its_child(tmp_path: Path) -> None:
    config = configuration(tmp_path)
    address = load_config(config).log.listen
    with taken(address):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "walsender_bridge.cli.app", "up", "--background"),
                *("-c", str(config)),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == Cause.CONFIG
    assert f"error: {address}: cannot listen: Address already in use\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert "process" not in done.stderr
    assert done.stdout == ""


#: By the section with the folder.
COMMANDS = {
    "log": ("log-server run", "bridge run", "up", "up --background"),
    "log-server": ("log-server run", "up"),
}


@pytest.mark.parametrize("which", ["log", "log-server"])
def test_a_data_dir_that_is_a_file_is_named(tmp_path: Path, which: str) -> None:
    config = configuration(tmp_path)
    (tmp_path / which).write_text("mine")
    for command in COMMANDS[which]:
        error = refused(config, *command.split())
        assert (error.cause, error.where) == (Cause.CONFIG, str(tmp_path / which)), command
        assert error.what == "it is not a folder"
    assert (tmp_path / which).read_text() == "mine"


@pytest.mark.parametrize("which", ["log", "log-server"])
@pytest.mark.parametrize("inside", ["", "/inside"])
def test_a_data_dir_that_is_read_only_is_named(tmp_path: Path, which: str, inside: str) -> None:
    (tmp_path / "disk").mkdir()
    config = configuration(tmp_path)
    config.write_text(config.read_text().replace(f'"{which}"', f'"disk{inside}"'))
    with mounted(tmp_path / "disk", "-o", "ro,size=1m,mode=0700"):
        for command in COMMANDS[which]:
            error = refused(config, *command.split())
            assert error.cause == Cause.UNAVAILABLE, command
            assert error.what == "cannot be written: Read-only file system"
            assert error.where.startswith(str(tmp_path / "disk"))
