"""`tuskline up` and `tuskline down`: the parts of this machine, under one supervisor."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from walsender_bridge.cli.doctor import of_quorum, of_source
from walsender_bridge.cli.options import DEFAULT_CONFIG, AsJson, ConfigPath, load_config
from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.errors import Cause, DeadlineError, TusklineError, of_cause
from walsender_bridge.provisioning.configured import needed_quorum, waits
from walsender_bridge.runtime import disk_full, extras, logs, pid_file, service_manager
from walsender_bridge.runtime.output import Output
from walsender_bridge.runtime.private_folder import private_file, private_folder

if TYPE_CHECKING:
    from walsender_bridge.config import Config
    from walsender_bridge.runtime.supervisor import Child

#: Seconds that a part gets to end: more than its own supervisor gives its children.
GRACE = 30.0
_BACKGROUND_SECONDS = 60.0


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("up")(up)
    app.command("down")(down)


def up(
    config: ConfigPath = DEFAULT_CONFIG,
    background: Annotated[
        bool,
        typer.Option("--background", help="Return when the parts run; `tuskline down` stops them."),
    ] = False,
) -> None:
    """Run the parts of this machine until SIGTERM or SIGINT.

    The parts are log server, bridge, lake and its maintenance, slots and metrics, as far as they are configured.
    """
    settings = load_config(config)
    if background:
        _start_in_background(config, settings)
        return
    logs.export_format(settings.logs.format)
    private_folder(settings.data_dir)
    from walsender_bridge.cli.parts import refuse_while_running

    with pid_file.held(settings.run_dir):
        refuse_while_running(settings)
        preflight(settings)
        import asyncio

        asyncio.run(_serve(_children(config, settings), settings.run_dir))


def preflight(settings: "Config") -> None:
    """Raise the first of `doctor`'s errors that a retry does not repair: no unreachable server, and no error of a single table.

    An error of one part, or of one source of several, is only reported. The others start, because COMMIT may wait for them
    and slots keep WAL. Once a quorum exists, or may exist elsewhere, all errors are only reported, except a configuration that would form another.
    """
    from walsender_bridge.cli.parts import refuse_quorum_of_one

    refuse_quorum_of_one(settings)
    _need_extras(settings)
    for error in _of_one_part(settings):
        logs.say_error(error)
    # On a machine of safekeepers the bridge is elsewhere, and so is the record of a quorum.
    hosts = "safekeepers" in settings.parts and "bridge" not in settings.parts
    quorum = hosts or settings.quorum_id_file.exists()
    for error in _of_the_log(settings):
        if not quorum:
            raise error
        logs.say_error(error)
    sources = settings.source if "bridge" in settings.parts else ()
    by_source = [_prevented(of_source(section)) for section in sources]
    # The safekeepers are not checked: they are started next.
    beside = _prevented([each for each in of_quorum(settings, reach=False) if each.prevents])
    nothing_runs = all(any(prevents for _, prevents in found) for found in by_source)
    for found, ends in (*((each, nothing_runs) for each in by_source), (beside, True)):
        for error, prevents in found:
            if prevents and ends and not quorum:
                raise error
            logs.say_error(error)


def _need_extras(settings: "Config") -> None:
    """Raises `NotSupportedError` if an extra that a configured part needs is not installed."""
    if not settings.parts.isdisjoint({"log-server", "safekeepers"}):
        extras.need("log-server")
    if "lake" in settings.parts:
        extras.need("spark")
    if settings.metrics is not None:
        extras.need("monitor")


def _prevented(findings: Iterable[Finding]) -> list[tuple[TusklineError, bool]]:
    """The errors among the findings, and whether each prevents the capture of its source, now and at a retry."""
    unavailable = {Cause.UNAVAILABLE, Cause.BEHIND, Cause.NOT_LEADER}
    passing = {Cause.CONNECTION, Cause.INTERNAL, *unavailable}
    return [
        (
            of_cause(finding.cause, finding.what, where=finding.where, repair=finding.repair),
            finding.prevents and finding.cause not in passing,
        )
        for finding in findings
        if finding.severity is Severity.ERROR
    ]


def _of_the_log(settings: "Config") -> Iterator[TusklineError]:
    """The errors that prevent the log's replicas or its repository from running, or from being used."""
    from walsender_bridge.cli.parts import CLOSED_SECONDS, prepare_log_server
    from walsender_bridge.observability import certificate_view
    from walsender_bridge.runtime import listening

    files = settings.tls_files
    if files is not None and (unfit := certificate_view.unfit(settings, files)):
        yield unfit
    try:
        prepare_log_server(settings)
    except TusklineError as error:
        yield error
    try:
        if "repository" in settings.parts:
            listening.check(settings.log.listen, seconds=CLOSED_SECONDS)
    except TusklineError as error:
        yield error


def _of_one_part(settings: "Config") -> Iterator[TusklineError]:
    """The errors that prevent the lake or a safekeeper from running."""
    if settings.lake is not None and "lake" in settings.parts:
        from spark_consumers.lake import folder
        from walsender_bridge.observability.lake_chain import store_options

        try:
            folder.check(settings.lake.uri, store_options(settings.lake))
        except TusklineError as error:
            yield error
    if "safekeepers" in settings.parts:
        from walsender_bridge.quorum.safekeeper import hosting

        yield from hosting.refused(hosting.of_machine(settings)).values()


def _children(config: Path, settings: "Config") -> "list[Child]":
    from walsender_bridge.cli.parts import commands
    from walsender_bridge.runtime.supervisor import Child

    parts = commands(settings)
    if settings.metrics is not None:
        parts["metrics"] = ["metrics"]
    command = [sys.executable, "-m", "walsender_bridge.cli.app"]
    return [
        Child(name, [*command, *arguments, "--config", str(config.resolve())])
        for name, arguments in parts.items()
    ]


async def _serve(children: "list[Child]", run_dir: Path) -> None:
    import asyncio

    from walsender_bridge.runtime.supervisor import Supervisor, stop_on_signals

    stop = asyncio.Event()
    stop_on_signals(stop)
    service_manager.say_ready()
    await Supervisor("up", children, run_dir=run_dir, grace=GRACE).run(stop)


def _start_in_background(config: Path, settings: "Config") -> None:
    from walsender_bridge.runtime.supervisor import read_states

    log_file = settings.data_dir / "logs" / "up.log"
    private_folder(settings.data_dir)
    with disk_full.named(log_file):
        log_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        private_file(log_file)
    begun = log_file.stat().st_size if log_file.exists() else 0
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "walsender_bridge.cli.app", "up", "-c", str(config.resolve())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + _BACKGROUND_SECONDS
    # The process takes its lock, then checks; it runs once its supervisor has written its pid.
    while read_states(settings.run_dir, "up").pid != process.pid:
        if process.poll() is not None:
            output = log_file.read_bytes()[begun:].decode("utf-8", "replace")
            full = disk_full.of_folder(settings.data_dir)
            if full is not None and "error:" not in output:
                raise full
            sys.stderr.write(output)
            raise typer.Exit(process.returncode)
        if time.monotonic() > deadline:
            raise DeadlineError("tuskline up did not start in time", where=str(log_file))
        time.sleep(0.05)
    # Errors of the checks that do not prevent a start.
    sys.stderr.write(log_file.read_bytes()[begun:].decode("utf-8", "replace"))
    Output(as_json=False).note(f"process {process.pid}, log {log_file}")


def down(
    config: ConfigPath = DEFAULT_CONFIG,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 90.0,
    as_json: AsJson = False,
) -> None:
    """Stop what `tuskline up` runs, and wait until it has ended."""
    settings = load_config(config)
    pid = pid_file.end(settings.run_dir, timeout)
    output = Output(as_json=as_json)
    if as_json:
        output.record({"ended": pid})
    else:
        output.note(f"process {pid} has ended" if pid else "tuskline up was not running")
    if settings.quorum_source is not None:
        # The proposer has ended, and commits that wait for it continue to wait.
        with contextlib.suppress(TusklineError):
            output.note(waits(needed_quorum(settings)))
