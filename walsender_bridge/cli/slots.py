"""`tuskline slots`: whether each failover candidate has a proven copy of every slot, and the controller that maintains them.

`status`, `ready` and `sync --once` answer with exit code 0 (all copies are ready), 1 (one is not) or 2 (unknown);
any other exit code is that of an error.
"""

import signal
import threading
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    load_config,
    need_here,
)
from walsender_bridge.errors import ConfigError, UsageError
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.output import Output

if TYPE_CHECKING:
    from slot_sync.plan import SlotSyncPlan
    from slot_sync.report import SlotReport
    from slot_sync.status_record import CopyRecord
    from walsender_bridge.config import Config, SlotsSection

slots_app = typer.Typer(
    help="Show and maintain slot copies on failover candidates. See docs/slots.md.",
    no_args_is_help=True,
)

READY: Final = 0
NOT_READY: Final = 1
UNKNOWN: Final = 2


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    app.add_typer(slots_app, name="slots")


MaxAge = Annotated[
    float | None,
    typer.Option(
        help="Accept proofs that are at most this many seconds old while the primary does not answer; default: max_age in [slots].",
        min=0,
    ),
]


@slots_app.command("status")
def status(
    config: ConfigPath = DEFAULT_CONFIG, max_age: MaxAge = None, as_json: AsJson = False
) -> None:
    """Show the copies of all selected slots on all candidates. Exit code 0: all are ready, 1: one is not, 2: unknown."""
    from slot_sync.controller import probe

    _answer(probe(plan(load_config(config), max_age=max_age)), as_json=as_json)


@slots_app.command("ready")
def ready(
    standby: Annotated[str, typer.Option("--standby", help="Name of the candidate in [slots].")],
    config: ConfigPath = DEFAULT_CONFIG,
    max_age: MaxAge = None,
    as_json: AsJson = False,
) -> None:
    """Check whether this candidate may be promoted now. Exit code 0: yes, 1: no, 2: unknown."""
    from slot_sync.controller import probe

    settings = load_config(config)
    known = configured(settings).candidates
    if standby not in known:
        raise ConfigError(
            f"candidate {standby!r} is not configured",
            where=str(config),
            repair=f"name one of: {', '.join(known)}",
        )
    _answer(probe(plan(settings, standby, max_age=max_age)), as_json=as_json)


@slots_app.command("sync")
def sync(
    config: ConfigPath = DEFAULT_CONFIG,
    once: Annotated[
        bool, typer.Option("--once", help="Do what can be done now, report the state, and exit.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Continue until SIGTERM or SIGINT, as under `up`.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            help="Seconds for --once, including the wait for another controller to end.", min=0
        ),
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Create, prove, advance and drop the candidates' copies. One controller is active; another one waits until it ends."""
    if once == watch:
        raise UsageError("either --once or --watch must be given", repair="add one of them")
    from slot_sync.controller import Controller
    from walsender_bridge.runtime import status_file
    from walsender_bridge.runtime.supervisor import exit_with_parent

    if watch:
        exit_with_parent()
        logs.begin_part()
    settings = load_config(config)
    need_here(settings, "slots")
    logs.export_format(settings.logs.format)
    with Controller(plan(settings)) as controller:
        if once:
            _answer(controller.once(timeout), as_json=as_json)
            return
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        settings.run_dir.mkdir(parents=True, exist_ok=True)
        controller.watch(
            stop, lambda report: status_file.write(settings.slots_status, report.status())
        )
    settings.slots_status.unlink(missing_ok=True)


def configured(settings: "Config") -> "SlotsSection":
    """The section `[slots]`. Raises `ConfigError` without one."""
    if settings.slots is None:
        if settings.machine is not None:
            need_here(settings, "slots")
        raise ConfigError(
            "no copies of slots are configured",
            repair="add [slots.candidates.NAME] with dsn and slot for each standby: docs/slots.md",
        )
    return settings.slots


def plan(
    settings: "Config", only: str | None = None, max_age: float | None = None
) -> "SlotSyncPlan":
    """The configured selection of slots and candidates; only the candidate `only`, if it is given."""
    from slot_sync.plan import FailoverCandidate, SlotSyncPlan
    from slot_sync.resolver.observed import ReadinessTerms, Selection

    section = configured(settings)
    seconds = section.max_age if max_age is None else max_age
    return SlotSyncPlan(
        settings.slots_dsn,
        tuple(
            FailoverCandidate(name, each.dsn, each.slot)
            for name, each in section.candidates.items()
            if only in {None, name}
        ),
        Selection(
            frozenset(section.names),
            section.patterns,
            frozenset(section.plugins),
            frozenset(section.databases),
        ),
        settings.slots_dir,
        section.poll,
        ReadinessTerms(round(seconds * 1e6), section.accept_native),
    )


def _answer(report: "SlotReport", *, as_json: bool) -> None:
    output = Output(as_json=as_json)
    status = report.status()
    if as_json:
        from walsender_bridge.observability import slots_view

        output.record(slots_view.shown(status))
    else:
        output.rows("slots", [_row(each) for each in status.slots])
        for word in (*status.problems, *status.not_known):
            output.note(word)
    raise typer.Exit({True: READY, False: NOT_READY, None: UNKNOWN}[status.ready])


def _row(each: "CopyRecord") -> dict[str, Any]:
    """The columns that fit on a line."""
    return {
        "standby": each.standby,
        "slot": each.slot,
        "state": each.state,
        "why": each.why,
        "lag_bytes": each.lag_bytes,
        "age": each.age,
    }
