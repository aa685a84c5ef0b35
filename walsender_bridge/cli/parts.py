"""`log-server run` and `bridge run`: their child processes, one for each hot loop."""

import asyncio
import socket
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

from walsender_bridge.change_log.replica import identity as log_server_identity
from walsender_bridge.cli import children
from walsender_bridge.config import Config
from walsender_bridge.errors import ConfigError, RunningError, TusklineError
from walsender_bridge.runtime import (
    disk_full,
    listening,
    logs,
    malloc_trim,
    pid_file,
    shared_files,
    tcp_connections,
)
from walsender_bridge.runtime.private_folder import private_folder
from walsender_bridge.runtime.supervisor import Child, Supervisor, stop_on_signals

#: What runs until the event is set.
_Task = Callable[[asyncio.Event], Coroutine[Any, Any, None]]
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


def commands(settings: Config) -> dict[str, list[str]]:
    """What `up` runs on this machine: by the name of the process, the arguments of its command."""
    here = settings.parts
    found = {}
    if not here.isdisjoint({"log-server", "safekeepers"}):
        # It may be started again while a disk is away: a new log server's directory is `prepare_log_server`'s.
        found["log-server"] = ["log-server", "run", "--no-create"]
    if not here.isdisjoint({"repository", "bridge"}):
        found["bridge"] = ["bridge", "run"]
    if "lake" in here:
        found["lake"] = ["lake", "run"]
        if settings.lake is not None and settings.lake.maintenance.enabled:
            found["maintain"] = ["lake", "maintain"]
    if "slots" in here:
        found["slots"] = ["slots", "sync", "--watch"]
    return found


def refuse_while_running(settings: Config) -> None:
    """Raises `RunningError` while a part that `up` would start already runs by itself."""
    places = [
        *(("log-server", each.data_dir) for each in settings.hosted_log_servers),
        *((part, settings.run_dir) for part in commands(settings) if part != "slots"),
    ]
    for part, folder in places:
        pid_file.refuse_while_running(folder, part, seconds=_GONE_SECONDS)


def prepare_log_server(settings: Config) -> None:
    """Create the data directories of new log servers, before `up` starts anything.

    Raises the error that would keep the log's replicas from running here: of their folder, or of their port.
    """
    folders = [each.data_dir for each in settings.hosted_log_servers]
    for folder in folders:
        private_folder(folder)
    with alone("log-server", folders):
        _create(folders)
        _check_ports(settings)


def _create(folders: Iterable[Path]) -> None:
    for folder in folders:
        with disk_full.named(folder):
            log_server_identity.prepare(folder)


def _check_ports(settings: Config) -> None:
    for each in settings.hosted_log_servers:
        # The replicas of a log server that was killed end a moment later.
        pid_file.wait_for_lock(each.data_dir / "lock", _GONE_SECONDS)
        listening.check(each.listen, seconds=CLOSED_SECONDS)


def log_server(settings: Config, *, create: bool = True) -> None:
    """Run the log replicas and the safekeepers of this machine, until SIGTERM or SIGINT.

    `create`: create the data directory of a new log server; otherwise one that is missing has been lost, and is left alone.
    A safekeeper whose data directory cannot be used stops for good; replicas and other safekeepers run (`hosting.prepare`).
    """
    regardless = "safekeepers" in settings.parts
    folders = [
        each.data_dir
        for each in settings.hosted_log_servers
        if create or log_server_identity.exists(each.data_dir)
    ]
    with _reported(regardless=regardless):
        for folder in folders:
            private_folder(folder)
    with alone("log-server", dict.fromkeys((settings.run_dir, *folders)), regardless=regardless):
        if create:
            with _reported(regardless=regardless):
                _create(folders)
        with _reported(regardless=regardless):
            _check_ports(settings)
        _log_server(settings)


def _log_server(settings: Config) -> None:
    from walsender_bridge.quorum.safekeeper import hosting

    section, safekeepers = settings.safekeepers, hosting.of_machine(settings)
    refused = hosting.prepare(safekeepers, section, settings.run_dir)
    hosted = children.safekeepers(safekeepers, section, refused, settings.tls_files)
    try:
        _supervise("log-server", [*children.replicas(settings), *hosted], settings)
    finally:
        hosting.clear(safekeepers, settings.run_dir)


def bridge(settings: Config) -> None:
    """Run the repository, the captures and the proposer, as far as they are here, until SIGTERM or SIGINT."""
    refuse_quorum_of_one(settings)
    regardless = settings.quorum_source is not None
    with alone("bridge", [settings.run_dir], regardless=regardless):
        _bridge(settings)


def _bridge(settings: Config) -> None:
    from walsender_bridge.change_log.repository.part import RepositoryPart

    tcp_connections.raise_open_files()
    repository = RepositoryPart(settings) if "repository" in settings.parts else None
    if repository is not None:
        repository.start()
    malloc_trim.start()
    try:
        if settings.quorum_source is not None:
            shared_files.prepare(settings.run_dir)
        beside = repository.keep if repository is not None else None
        if settings.machine is not None and settings.machine.elect_bridge:
            _run(partial(_elected, settings), beside)
        else:
            found = [*children.captures(settings), *children.proposers(settings)]
            _supervise("bridge", found, settings, beside=beside)
    finally:
        if repository is not None:
            repository.stop()
        _clear_proposer(settings)


def _clear_proposer(settings: Config) -> None:
    """Remove what a proposer that has ended said last."""
    names = settings.proposer_status.name, settings.commit_page.name
    shared_files.clear(settings.run_dir, *names)


async def _elected(settings: Config, stop: asyncio.Event) -> None:
    """Run captures and proposer while this bridge is the active one of several (`bridge_election`)."""
    from walsender_bridge.change_log.repository.etcd import EtcdSettings
    from walsender_bridge.cli.bridge_election import run_elected
    from walsender_bridge.cli.bridge_reach import LogReach
    from walsender_bridge.observability.bridge_view import ACTIVE, STANDING_BY, UNSURE, BridgeState

    assert settings.etcd is not None, "load_config has checked it"
    captures, proposers = children.captures(settings), children.proposers(settings)
    runs: dict[BridgeState, list[Child]] = {
        ACTIVE: [*captures, *proposers],
        UNSURE: proposers,
        STANDING_BY: [],
    }
    own = settings.log.listen if "repository" in settings.parts else socket.gethostname()
    cluster, run_dir = EtcdSettings.of(settings.etcd), settings.run_dir
    # By then another repository may lead, and a stream has been sealed without the log servers that are away.
    reach = LogReach(settings, 2 * cluster.lease + settings.log.replica_timeout)
    ended = partial(_clear_proposer, settings)
    await run_elected(cluster, own, runs, run_dir, stop, ended, reach)


def refuse_quorum_of_one(settings: Config) -> None:
    """Raises `ConfigError` if the bridge would use the only safekeeper of this machine as the whole quorum."""
    section = settings.safekeepers
    if settings.quorum_source is not None and section.is_alone:
        raise ConfigError(
            "this machine hosts a single safekeeper, which a bridge here would use as the whole quorum",
            where="[safekeepers] addresses",
            repair="on a machine that only hosts safekeepers, name them alone in [machine] parts; run the bridge where"
            f' addresses lists all of them; for a quorum of one, set addresses = ["{section.listen}"]',
        )


def _supervise(
    name: str,
    found: list[Child],
    settings: Config,
    *,
    beside: _Task | None = None,
) -> None:
    _run(Supervisor(name, found, run_dir=settings.run_dir).run, beside)


def _run(main: _Task, beside: _Task | None) -> None:
    """Run both until SIGTERM or SIGINT."""

    async def serve() -> None:
        stop = asyncio.Event()
        stop_on_signals(stop)
        async with asyncio.TaskGroup() as tasks:
            if beside is not None:
                tasks.create_task(beside(stop))
            await main(stop)

    asyncio.run(serve())
