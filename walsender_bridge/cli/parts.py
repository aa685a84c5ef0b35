"""`log-server run` and `bridge run`: their child processes, one for each hot loop."""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from walsender_bridge.config import Config
from walsender_bridge.errors import Cause, ConfigError, RunningError, TusklineError
from walsender_bridge.runtime import listening, logs, malloc_trim, pid_file, shared_files
from walsender_bridge.runtime.private_folder import private_folder
from walsender_bridge.runtime.supervisor import Child, Supervisor, stop_on_signals

#: A proposer that ends with one of these was fenced, or would corrupt WAL: it must not be restarted (rule 5).
_PROPOSER_FINAL = frozenset(
    {Cause.FENCED, Cause.DIVERGED, Cause.CORRUPT, Cause.INVARIANT, Cause.USAGE, Cause.CONFIG}
)
#: A capture that ends with one of these met WAL that its server can never send (`row_limit`), or a bug.
_CAPTURE_FINAL = frozenset({Cause.INVARIANT, Cause.UNSUPPORTED_VALUE})
#: Seconds within which the children of a killed process have ended.
_GONE_SECONDS: Final = 10.0
#: Seconds within which the kernel has closed the sockets of a process that has ended.
CLOSED_SECONDS: Final = 1.0


@contextmanager
def alone(part: str, folders: Iterable[Path], *, regardless: bool = False) -> Iterator[None]:
    """Hold the locks of this part in these folders. Raises `RunningError` if another process does, or the error of a lock.

    `regardless`: a lock that cannot be created is only reported, because COMMIT may wait for the part.
    """
    with ExitStack() as locks:
        for folder in folders:
            with _reported(regardless=regardless):
                locks.enter_context(pid_file.held(folder, part))
        yield


@contextmanager
def _reported(*, regardless: bool) -> Iterator[None]:
    """With `regardless`, report an error of the block instead of raising it."""
    try:
        yield
    except RunningError:
        raise
    except TusklineError as error:
        if not regardless:
            raise
        logs.say_error(error)


def refuse_while_running(settings: Config) -> None:
    """Raises `RunningError` while a part that `up` would start already runs by itself."""
    here = ["log-server", "bridge"] + ["lake"] * (settings.lake is not None)
    places = [
        ("log-server", settings.log_server[0].data_dir),
        *((part, settings.run_dir) for part in here),
    ]
    for part, folder in places:
        pid_file.refuse_while_running(folder, part, seconds=_GONE_SECONDS)


def check_log_server(settings: Config) -> None:
    """Raises the error that would keep the log's replicas from running here: of their folder, or of their port."""
    folder = settings.log_server[0].data_dir
    private_folder(folder)
    with alone("log-server", [folder]):
        _check_port(settings)


def _check_port(settings: Config) -> None:
    log_server = settings.log_server[0]
    # The replicas of a log server that was killed end a moment later.
    pid_file.wait_for_lock(log_server.data_dir / "lock", _GONE_SECONDS)
    listening.check(log_server.listen, seconds=CLOSED_SECONDS)


def log_server(settings: Config) -> None:
    """Run the log replicas and the safekeepers of this machine, until SIGTERM or SIGINT.

    A safekeeper whose data directory cannot be used stops for good; replicas and other safekeepers run (`hosting.prepare`).
    """
    regardless, folder = bool(settings.safekeepers.local), settings.log_server[0].data_dir
    with _reported(regardless=regardless):
        private_folder(folder)
    with alone("log-server", dict.fromkeys((settings.run_dir, folder)), regardless=regardless):
        with _reported(regardless=regardless):
            _check_port(settings)
        _log_server(settings)


def _log_server(settings: Config) -> None:
    from walsender_bridge.quorum.safekeeper import hosting

    section, log_server = settings.safekeepers, settings.log_server[0]
    safekeepers = hosting.hosted(section, log_server.data_dir, settings.run_dir)
    refused = hosting.prepare(safekeepers, section, settings.run_dir)
    argv = [sys.executable, "-m", "walsender_bridge.change_log.log_server"]
    argv += ["--data-dir", str(log_server.data_dir), "--listen", log_server.listen]
    children = [Child("replicas", argv), *hosting.children(safekeepers, section, refused)]
    try:
        _supervise("log-server", children, settings)
    finally:
        hosting.clear(safekeepers, settings.run_dir)


def bridge(settings: Config) -> None:
    """Run the repository, the captures and the proposer, until SIGTERM or SIGINT."""
    refuse_quorum_of_one(settings)
    regardless = settings.quorum_source is not None
    with alone("bridge", [settings.run_dir], regardless=regardless):
        _bridge(settings)


def _bridge(settings: Config) -> None:
    from walsender_bridge.change_log.repository.part import RepositoryPart

    repository = RepositoryPart(settings)
    repository.start()
    malloc_trim.start()
    try:
        children = [*_captures(settings), *_proposer(settings)]
        _supervise("bridge", children, settings, beside=repository.keep)
    finally:
        repository.stop()
        names = settings.proposer_status.name, settings.commit_page.name
        shared_files.clear(settings.run_dir, *names)


def _captures(settings: Config) -> list[Child]:
    children = []
    for source in settings.source:
        argv = [sys.executable, "-m", "walsender_bridge.capture", "--source", source.name]
        argv += ["--slot", source.slot_name, "--publication", source.publication_name]
        argv += ["--log", settings.log_address, "--spool", str(settings.spool_dir / source.name)]
        argv += ["--spool-limit", str(source.spool_limit)]
        argv += ["--status-file", str(settings.capture_status(source))]
        for table in source.tables:
            argv += ["--table", table]
        gate = settings.gate_of(source)
        argv += [f"--candidate={slot}" for slot in gate.names]
        argv += ["--members"] * bool(gate.members)
        argv += ["--gate-quorum", str(gate.quorum or 0), "--on-missing", gate.on_missing]
        argv += [
            "--degrade-after",
            str(gate.degrade_after),
            "--max-uncommitted-bytes",
            str(gate.max_uncommitted_bytes),
        ]
        argv += ["--gate-record", str(settings.gate_record(source))]
        if gate.safekeepers:
            argv += ["--commit-page", str(settings.commit_page)]
        # The DSN may contain a password, and every account can read arguments.
        env = {"TUSKLINE_SOURCE_DSN": source.dsn}
        children.append(Child(f"capture-{source.name}", argv, env=env, final=_CAPTURE_FINAL))
    return children


def _proposer(settings: Config) -> list[Child]:
    from walsender_bridge.quorum.proposer.effects import Limits

    source, section = settings.quorum_source, settings.safekeepers
    if source is None:
        return []
    shared_files.prepare(settings.run_dir)
    argv = [sys.executable, "-m", "walsender_bridge.quorum.proposer"]
    argv += [f"--safekeeper={address}" for address in section.proposed_to]
    argv += ["--application-name", section.application_name, "--slot", section.slot]
    # WAL in flight to a safekeeper takes memory as well: the queue gets the rest.
    inflight = Limits().inflight_bytes * len(section.proposed_to)
    argv += ["--queue-bytes", str(section.max_queue_bytes - inflight)]
    argv += ["--max-laggard-bytes", str(section.max_laggard_bytes)]
    argv += ["--status-file", str(settings.proposer_status)]
    argv += ["--commit-page", str(settings.commit_page)]
    argv += ["--members-file", str(settings.members_request)]
    argv += ["--quorum-file", str(settings.quorum_id_file)]
    env = {"TUSKLINE_SOURCE_DSN": source.dsn}
    return [Child("proposer", argv, env=env, final=_PROPOSER_FINAL)]


def refuse_quorum_of_one(settings: Config) -> None:
    """Raises `ConfigError` if the bridge would use the only safekeeper of this machine as the whole quorum."""
    section = settings.safekeepers
    if settings.quorum_source is not None and section.is_alone:
        raise ConfigError(
            "this machine hosts a single safekeeper, which a bridge here would use as the whole quorum",
            where="[safekeepers] addresses",
            repair="on a machine that only hosts safekeepers, run `tuskline log-server run`; run the bridge where addresses"
            f' lists all of them; for a quorum of one, set addresses = ["{section.listen}"]',
        )


def _supervise(
    name: str,
    children: list[Child],
    settings: Config,
    *,
    beside: Callable[[asyncio.Event], Coroutine[Any, Any, None]] | None = None,
) -> None:
    async def serve() -> None:
        stop = asyncio.Event()
        stop_on_signals(stop)
        async with asyncio.TaskGroup() as tasks:
            if beside is not None:
                tasks.create_task(beside(stop))
            await Supervisor(name, children, run_dir=settings.run_dir).run(stop)

    asyncio.run(serve())
