"""`tuskline lake maintain`: rewrites small data files, and those with many removed rows, beside the driver, without Spark.

It may run on any machine that has the lake, and several may: one works at a time, and what it prepares counts only once the
driver has made it part of the lake (docs/decisions/lake-maintenance.md).
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    lake_section,
    load_config,
    need_here,
)
from walsender_bridge.errors import DeadlineError, RunningError
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.output import Output
from walsender_bridge.runtime.private_folder import private_folder

if TYPE_CHECKING:
    from spark_consumers.lake.maintenance.maintainer import Maintainer
    from walsender_bridge.config import Config

#: What the process gives way to others by: epochs come first.
_NICE = 10


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("maintain")(lake_maintain)


def lake_maintain(
    config: ConfigPath = DEFAULT_CONFIG,
    once: Annotated[
        bool, typer.Option("--once", help="Do what is due now, wait for the driver, and exit.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="With --once: seconds to wait for the driver's decisions.")
    ] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Rewrite small data files, and those with many removed rows.

    It runs beside `lake run`, without Spark, until SIGTERM or SIGINT. SIGUSR1 has it look at all tables now.
    """
    from walsender_bridge.cli.parts import alone

    if once:
        logs.configure()
        settings = load_config(config)
        lake_section(settings)
        need_here(settings, "lake")
        with _unless_maintained(settings), alone("maintain", [settings.run_dir]):
            _once(settings, timeout, Output(as_json=as_json))
        return
    from walsender_bridge.runtime.supervisor import exit_with_parent

    exit_with_parent()
    logs.begin_part()
    settings = load_config(config)
    lake_section(settings)
    need_here(settings, "lake")
    logs.export_format(settings.logs.format)
    private_folder(settings.data_dir)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    maintainer = _maintainer(settings)
    signal.signal(signal.SIGUSR1, lambda *_: maintainer.look_now())
    with alone("maintain", [settings.run_dir]):
        maintainer.run(stop)


@contextlib.contextmanager
def _unless_maintained(settings: "Config") -> Iterator[None]:
    """Raises `RunningError` with a hint of its own while a maintainer of this configuration runs."""
    from walsender_bridge.runtime import pid_file

    try:
        yield
    except RunningError as error:
        pid = pid_file.owner(settings.run_dir, "maintain")
        if pid is None:
            raise
        interval = lake_section(settings).maintenance.interval
        raise RunningError(
            error.what,
            where=error.where,
            repair=f"no action is needed: it does the same work every {interval:g} s, and `tuskline status` shows its progress;"
            f" kill -USR1 {pid} has it look at all tables now",
        ) from None


def _maintainer(settings: "Config", *, settled: float | None = None) -> "Maintainer":
    from spark_consumers.lake.maintenance.maintainer import Limits, Maintainer
    from walsender_bridge.observability.lake_chain import store_options

    lake = lake_section(settings)
    kept = lake.maintenance
    after = kept.settled if settled is None else settled
    limits = Limits(kept.file_bytes, kept.plan_bytes, kept.interval, after)
    return Maintainer(lake.uri, limits, store=store_options(lake))


def _once(settings: "Config", timeout: float, output: Output) -> None:
    """Carry out plans until nothing is due. Raises `DeadlineError` if the driver does not decide in time."""
    stop = threading.Event()
    timer = threading.Timer(timeout, stop.set)
    timer.daemon = True
    timer.start()
    # Whoever asks for it once wants it done for the tables as they are.
    maintainer = _maintainer(settings, settled=0)
    try:
        while maintainer.run_once(stop, clean=False) and not stop.is_set():
            pass
        maintainer.clean_all(stop)
        named = maintainer.to_clean()
        maintainer.wait_for_cleaning(stop)
        seen, left = maintainer.summary, maintainer.to_clean()
    finally:
        timer.cancel()
        maintainer.close()
    record: dict[str, Any] = {
        "tables": seen.tables,
        "accepted": seen.accepted,
        "refused": seen.refused,
        "files_before": seen.files_before,
        "files_after": seen.files_after,
        "rewritten_bytes": seen.rewritten_bytes,
        "cleaned": len(named) - len(left),
        "standing_by": seen.is_standing_by,
    }
    output.record(record)
    for refusal in seen.refusals:
        output.note(f"{refusal.table}: offer refused: {refusal.reason}")
    pending = [f"decided on {seen.waiting} offers"] if seen.waiting else []
    pending += [f"looked at {len(left)} tables that have something to expire"] if left else []
    if pending:
        raise DeadlineError(
            f"the driver has not {', nor '.join(pending)}; the requests stay pending",
            where=lake_section(settings).uri,
            repair="check that `tuskline lake run` is running",
        )
