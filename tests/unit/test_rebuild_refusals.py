"""`tuskline log rebuild` beside a repository that runs, hangs, is stopped, or whose machine does not answer."""

import contextlib
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.tls import HOSTS, Authority, TlsLog
from walsender_bridge.change_log.repository.rebuilder import refuse_running
from walsender_bridge.cli.app import app
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import (
    InvalidReplicaError,
    RunningError,
    UnavailableError,
    UsageError,
)
from walsender_bridge.runtime import listening
from walsender_bridge.runtime.tls_files import TlsFiles


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """An address that answers nothing, as that of a machine that is off: no place is left to wait for `accept`."""
    with contextlib.ExitStack() as held:
        listening = held.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        place = listening.getsockname()
        for _ in range(8):
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(place)
        yield f"127.0.0.1:{place[1]}"


def rebuilds(
    folder: Path, listen: str, tls: TlsFiles | None = None
) -> Callable[..., BaseException]:
    """Runs the command on the machine of a repository that listens there; returns its error."""
    config = folder / "tuskline.toml"
    text = (
        f'[log]\ndata_dir = "log"\nlisten = "{listen}"\n'
        f'[[log_server]]\ndata_dir = "log-server"\nlisten = "127.0.0.1:{free_port()}"\n'
        '[[source]]\nname = "shop"\ndsn = "dbname=shop"\n'
    )
    if tls is not None:
        text += f'[tls]\nca = "{tls.ca}"\ncertificate = "{tls.certificate}"\nkey = "{tls.key}"\n'
    config.write_text(text)

    def run(*options: str) -> BaseException:
        arguments = ["log", "rebuild", "--dry-run", "-c", str(config), *options]
        error = CliRunner().invoke(app, arguments).exception
        assert error is not None
        return error

    return run


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "tls"])
def test_31_a_refused_connection_is_a_stopped_repository(tmp_path: Path, with_tls: bool) -> None:
    files = None
    if with_tls:
        files = Authority(tmp_path).issue("repository", "log-server", "operator", hosts=HOSTS)
    error = rebuilds(tmp_path, f"127.0.0.1:{free_port()}", files)()
    # It went on to the log servers, none of which runs.
    assert not isinstance(error, RunningError)
    assert isinstance(error, UnavailableError | InvalidReplicaError)
    assert "log server" in str(error)


def test_31_a_machine_that_does_not_answer_is_not_taken_for_stopped(tmp_path: Path) -> None:
    with silent() as address:
        rebuild = rebuilds(tmp_path, address)
        error = rebuild()
        assert isinstance(error, UnavailableError)
        assert error.where == address
        assert "not known whether a repository runs" in error.what
        assert f"--stopped {address}" in error.repair
        error = rebuild("--stopped", address)
        assert "log server" in str(error), "it went on to the log servers"
    assert isinstance(rebuild("--stopped", "127.0.0.1:1"), UsageError)


def test_31_another_machine_that_refuses_may_have_a_firewall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    refuse_running([listen])  # this machine's own
    monkeypatch.setattr(listening, "is_own", lambda _host: False)
    away = f"127.0.0.1:{free_port()}"
    for log_servers in ((), (away,), ("localhost:1",)):
        with pytest.raises(UnavailableError, match="firewall, refuses connections") as found:
            refuse_running([listen], (), log_servers)
        assert found.value.where == listen
        assert f"--stopped {listen}" in found.value.repair
    refuse_running([listen], [listen])
    with socket.create_server(("127.0.0.1", 0)) as log_server:
        # Its machine accepts connections from here.
        refuse_running([listen], (), [away, f"127.0.0.1:{log_server.getsockname()[1]}"])


def test_which_hosts_are_this_machine() -> None:
    for own in ("127.0.0.1", "127.9.9.9", "localhost"):
        assert listening.is_own(own)
    # Addresses and a name that nobody has (RFC 5737, RFC 2606).
    for other in ("192.0.2.1", "203.0.113.7", "no-such-host.invalid"):
        assert not listening.is_own(other)


def test_31_a_repository_that_hangs_runs_whatever_is_said_of_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        address = f"127.0.0.1:{hangs.getsockname()[1]}"
        rebuild = rebuilds(tmp_path, address)
        for options in ((), ("--stopped", address)):
            error = rebuild(*options)
            assert isinstance(error, RunningError)
            assert error.where == address


def test_31_a_repository_with_certificates_that_runs_is_not_replaced(tmp_path: Path) -> None:
    log = TlsLog(tmp_path / "runs", Authority(tmp_path))
    try:
        listen = log.repository.address.partition("://")[2]
        assert isinstance(rebuilds(tmp_path, listen, log.files)(), RunningError)
    finally:
        log.stop()
