"""The log's repository within `bridge run`, which also runs the proposer.

Without a proposer, a repository that cannot start ends the bridge, whose supervisor restarts it. With one, COMMIT may
be waiting for the proposer, so the bridge runs on, retries the repository every few seconds, and writes the reason to a
file in the run folder, which `status` reads.

Invariant: of two bridges in one folder only one runs a proposer, as long as the run folder's lock (`pid_file`) or the
repository's file can be locked.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from walsender_bridge.errors import ConfigError, TusklineError, UnavailableError
from walsender_bridge.runtime import logs, processes, status_file
from walsender_bridge.runtime.error_record import ErrorRecord
from walsender_bridge.runtime.status_file import Status

if TYPE_CHECKING:
    import asyncio

    from walsender_bridge.change_log.repository.candidate import RepositoryCandidate
    from walsender_bridge.change_log.repository.record_store import RecordStore
    from walsender_bridge.change_log.repository.service import RepositoryServer
    from walsender_bridge.config import Config

_PAUSE: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryStatus(Status):
    """`error`: why the repository does not run. Without such a file it runs, or no bridge does."""

    error: ErrorRecord


class RepositoryPart:
    """Starts the repository, retries it while the supervisor runs (`keep`), and stops it."""

    def __init__(self, settings: "Config") -> None:
        self._settings = settings
        self._server: RepositoryServer | RepositoryCandidate | None = None
        self._said = ""

    def start(self) -> None:
        """Start the repository.

        Raises `TusklineError` on failure, unless the bridge has a proposer and no other bridge runs here.
        """
        try:
            self._start()
        except ConfigError:
            # Another bridge uses the folder or the port: a second proposer would displace its proposer.
            raise
        except TusklineError as error:
            if self._settings.quorum_source is None:
                raise
            self._report(error)

    async def keep(self, stop: "asyncio.Event") -> None:
        """Retry until the repository runs."""
        import asyncio

        while self._server is None and not stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _PAUSE)
            if stop.is_set():
                return
            try:
                await asyncio.to_thread(self._start)
            except TusklineError as error:
                self._report(error)

    def _start(self) -> None:
        self._server = self._started()
        _file(self._settings.run_dir).unlink(missing_ok=True)

    def _report(self, error: TusklineError) -> None:
        if error.what != self._said:
            logs.say_error(error)
        self._said = error.what
        with contextlib.suppress(OSError):
            self._settings.run_dir.mkdir(parents=True, exist_ok=True)
        status = RepositoryStatus(error=ErrorRecord.of(error))
        status_file.write(_file(self._settings.run_dir), status)

    def stop(self) -> None:
        """Stop the repository."""
        if self._server is not None:
            self._server.stop()
        _file(self._settings.run_dir).unlink(missing_ok=True)

    def _started(self) -> "RepositoryServer | RepositoryCandidate":
        import sqlite3

        try:
            server = self._serve() if self._settings.etcd is None else self._candidate()
            try:
                server.start()
            except BaseException:
                with contextlib.suppress(Exception):
                    server.stop()
                raise
        except (OSError, sqlite3.Error) as error:
            raise UnavailableError(
                f"could not start the log's repository: {error}",
                where=str(self._settings.repository_dir),
                repair="free disk space there, or check the disk; the start is retried",
            ) from None
        return server

    def _serve(self, store: "RecordStore | None" = None) -> "RepositoryServer":
        """The repository over this store; None: over its own database."""
        from walsender_bridge.change_log.repository.membership import ReplicationPolicy
        from walsender_bridge.change_log.repository.service import RepositoryServer

        settings = self._settings
        return RepositoryServer(
            settings.repository_dir,
            settings.log.listen,
            log_servers=[log_server.listen for log_server in settings.log_server],
            retention=settings.log.retention,
            replication=ReplicationPolicy(
                settings.replicas, settings.min_replicas, settings.log.replica_timeout
            ),
            store=store,
            tls=settings.tls_files,
        )

    def _candidate(self) -> "RepositoryCandidate":
        """One of the repositories whose records are in etcd."""
        from walsender_bridge.change_log.repository.candidate import RepositoryCandidate
        from walsender_bridge.change_log.repository.etcd import EtcdSettings
        from walsender_bridge.change_log.repository.log_server_link import reaches

        settings, its = self._settings, self._settings.etcd
        assert its is not None
        listens = [log_server.listen for log_server in settings.log_server]
        return RepositoryCandidate(
            EtcdSettings.of(its),
            settings.log.listen,
            self._serve,
            settings.tls_files,
            lambda: reaches(listens, settings.min_replicas, settings.tls_files),
        )


def trouble(run_dir: Path) -> TusklineError | None:
    """Why the repository of a running bridge does not run; None if it does, or if nothing is known."""
    found = status_file.read(_file(run_dir), RepositoryStatus)
    if found is None or not processes.alive(found.pid):
        return None
    return found.error.error()


def _file(run_dir: Path) -> Path:
    return run_dir / "repository.status.json"
