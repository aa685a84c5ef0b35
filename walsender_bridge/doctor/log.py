"""Checks of the change log: files on this machine that prevent a log server or a bridge from starting if damaged; its replicas."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from walsender_bridge.change_log.replica import identity as log_server_identity
from walsender_bridge.change_log.repository.store import RepositoryStore
from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.doctor.server import failed
from walsender_bridge.errors import CorruptError, TusklineError

if TYPE_CHECKING:
    from walsender_bridge.change_log.repository_messages import ConsumerDescription
    from walsender_bridge.observability.replica_view import StreamReplicas


def log_servers(data_dirs: Iterable[Path]) -> Iterator[Finding]:
    """Each `log-server.json` that is damaged; nothing for a log server of another machine or user."""
    for data_dir in data_dirs:
        try:
            with contextlib.suppress(OSError):
                log_server_identity.load(data_dir)
        except TusklineError as error:
            yield failed("log-server", error.where, error)


def repository(path: Path) -> Iterator[Finding]:
    """Whether the database of a repository that is not running can be read: a copy is, as the file may be opened meanwhile."""
    # One copy may have been taken during a write, and prove nothing; two failures do.
    errors = [_error(path), _error(path)]
    if errors[0] is not None and errors[1] is not None:
        yield failed("log", str(path), errors[1])


def degraded(streams: "Iterable[StreamReplicas]") -> Iterator[Finding]:
    """The streams with fewer replicas in sync than they should have, as `status` names them."""
    for stream in streams:
        for sentence in stream.degraded():
            what, _, repair = sentence.removeprefix("log: ").partition("; ")
            where = f"stream {stream.stream}"
            yield Finding("replicas", where, what, Severity.WARNING, repair=repair)


def leases(consumers: "Iterable[ConsumerDescription]") -> Iterator[Finding]:
    """The leases of lakes that end soon, as `status` names them."""
    from walsender_bridge.observability import lake_leases

    for lease in lake_leases.ending(consumers, time.time()):
        yield Finding("leases", "log", lease.what, Severity.WARNING, repair=lease.repair)


def _error(path: Path) -> CorruptError | None:
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(OSError):
        for name in (path.name, f"{path.name}-wal"):
            if (path.parent / name).exists():
                shutil.copy(path.parent / name, folder)
        if not (Path(folder) / path.name).exists():
            return None
        try:
            RepositoryStore(Path(folder) / path.name).close()
        except CorruptError as error:
            return error
        except TusklineError:
            return None
    return None
