"""What `keeper run` and `bridge run` run: their child processes, one for each hot loop."""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from walsender_bridge import freed_memory, in_memory
from walsender_bridge.config import Config
from walsender_bridge.errors import Cause, ConfigError
from walsender_bridge.supervisor import Child, Supervisor, stop_on_signals

#: A proposer that ends so was fenced, or would corrupt: it must not come back by itself (rule 5).
_PROPOSER_FINAL = frozenset(
    {Cause.FENCED, Cause.DIVERGED, Cause.CORRUPT, Cause.USAGE, Cause.CONFIG}
)
#: A capture that ends so met WAL that its server cannot send, now or ever (`wire.row_limit`).
_CAPTURE_FINAL = frozenset({Cause.UNSUPPORTED_VALUE})


def keeper(settings: Config) -> None:
    """Run the log replicas and the safekeepers of this machine, until SIGTERM or SIGINT.

    A safekeeper whose data directory cannot be used ends for good; replicas and other safekeepers run (`hosting.prepare`).
    """
    from walsender_bridge.safekeeper import hosting

    section, keeper = settings.safekeepers, settings.keeper[0]
    safekeepers = hosting.hosted(section, keeper.data_dir, settings.run_dir)
    refused = hosting.prepare(safekeepers, section, settings.run_dir)
    argv = [sys.executable, "-m", "walsender_bridge.change_log.keeper"]
    argv += ["--data-dir", str(keeper.data_dir), "--listen", keeper.listen]
    children = [Child("replicas", argv), *hosting.children(safekeepers, section, refused)]
    try:
        _supervise("keeper", children, settings)
    finally:
        hosting.clear(safekeepers, settings.run_dir)


def bridge(settings: Config) -> None:
    """Run the repository, the captures and the proposer, until SIGTERM or SIGINT."""
    from walsender_bridge.commands.repository_part import RepositoryPart

    refuse_quorum_of_one(settings)
    repository = RepositoryPart(settings)
    repository.start()
    freed_memory.keep_returning()
    try:
        children = [*_captures(settings), *_proposer(settings)]
        _supervise("bridge", children, settings, beside=repository.keep)
    finally:
        repository.stop()
        in_memory.clear(settings.run_dir, settings.proposer_status.name)


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
        argv += ["--degrade-after", str(gate.degrade_after), "--held-limit", str(gate.held_limit)]
        argv += ["--gate-record", str(settings.gate_record(source))]
        if gate.safekeepers:
            argv += ["--proposer-status", str(settings.proposer_status)]
        # The DSN may hold a password, and arguments are everybody's to read.
        env = {"TUSKLINE_SOURCE_DSN": source.dsn}
        children.append(Child(f"capture-{source.name}", argv, env=env, final=_CAPTURE_FINAL))
    return children


def _proposer(settings: Config) -> list[Child]:
    from walsender_bridge.proposer.effects import Limits

    source, section = settings.quorum_source, settings.safekeepers
    if source is None:
        return []
    in_memory.prepare(settings.run_dir)
    argv = [sys.executable, "-m", "walsender_bridge.proposer"]
    argv += [f"--safekeeper={address}" for address in section.proposed_to]
    argv += ["--application-name", section.application_name, "--slot", section.slot]
    # What is on the way to a safekeeper is in memory too: the queue has the rest.
    inflight = Limits().inflight_bytes * len(section.proposed_to)
    argv += ["--queue-bytes", str(section.max_queue_bytes - inflight)]
    argv += ["--max-laggard-bytes", str(section.max_laggard_bytes)]
    argv += ["--status-file", str(settings.proposer_status)]
    argv += ["--members-file", str(settings.members_request)]
    argv += ["--quorum-file", str(settings.quorum_id_file)]
    env = {"TUSKLINE_SOURCE_DSN": source.dsn}
    return [Child("proposer", argv, env=env, final=_PROPOSER_FINAL)]


def refuse_quorum_of_one(settings: Config) -> None:
    """Raises `ConfigError` where a bridge would make the one safekeeper that it hosts a quorum by itself."""
    section = settings.safekeepers
    if settings.quorum_source is not None and section.is_alone:
        raise ConfigError(
            "this machine hosts one safekeeper, which a bridge here would use as the whole quorum",
            where="[safekeepers] addresses",
            repair="on machines for safekeepers only, run `tuskline keeper run`; run the bridge where addresses"
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
