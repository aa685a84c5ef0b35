"""`tuskline reattach`: continues after a lost slot, on another cluster, or with another log."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    Admin,
    AsJson,
    ConfigPath,
    checked_admin,
    chosen_sources,
    load_config,
    need_here,
)
from walsender_bridge.errors import Cause
from walsender_bridge.observability.lake_chain import lake_chain
from walsender_bridge.provisioning.configured import capture_source
from walsender_bridge.runtime.output import Output

if TYPE_CHECKING:
    from walsender_bridge.change_log.client import LogClient
    from walsender_bridge.config import Config, SourceSection

#: Seconds within which a capture that is starting reports whether it streams.
_CAPTURE_SECONDS: Final = 5.0
#: Causes with which a capture stops for good, and that only what the server sends shows.
_FOR_GOOD: Final = {Cause.DIVERGED.name, Cause.PUBLICATION.name}

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only report which sources cannot continue, and why.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Include sources that appear able to continue.")
]
Sources = Annotated[
    list[str] | None,
    typer.Argument(metavar="SOURCE", help="Names of sources; default: all.", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("reattach")(reattach)


def reattach(
    sources: Sources = None,
    config: ConfigPath = DEFAULT_CONFIG,
    admin: Admin = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Restart sources that cannot continue, and bring their tables level.

    Their names stay the same. Use it after a slot or a publication was lost, on another server, after `detach` and `init`,
    or when the log was removed. The log must be running (`tuskline up`). Sources that can continue are left as they are.
    With the bridge and the lake on two machines, run it on both: the first continues the sources, the second the lake.
    """
    from walsender_bridge.change_log.client import LogClient
    from walsender_bridge.provisioning import reattach as attaching

    settings = load_config(config)
    if sources:
        need_here(settings, "bridge")
    need_here(settings, "bridge", "lake")
    admin = checked_admin(admin)
    output = Output(as_json=as_json)
    names: Sequence[str | None] = sources or [None]
    here = names if "bridge" in settings.parts else ()
    chosen = [section for name in here for section in chosen_sources(settings, name)]
    rows: list[dict[str, str]] = []
    with LogClient(settings.log_address) as log:
        for section in chosen:
            source = capture_source(section)
            why = attaching.reason(source, log, admin) or _of_capture(settings, section, log)
            if why is None and not force:
                continue
            if not dry_run:
                attaching.reattach(source, log, admin)
            rows.append({"source": section.name, "reason": why or "--force"})
        rows += _lake(settings, log.status().log_id, dry_run=dry_run)
    if rows or as_json:
        output.rows("reattached", rows)
    if not rows:
        output.note("nothing to do: every source can continue")
    elif not dry_run:
        output.note(
            "the tables of these sources are compared with the lake, and brought level or copied; `tuskline flush` waits for them"
        )


def _of_capture(settings: "Config", section: "SourceSection", log: "LogClient") -> str | None:
    """Why its capture stopped here, if only what the server sends shows that it cannot continue."""
    from walsender_bridge.capture import stream_record
    from walsender_bridge.capture.status_record import CaptureStatus
    from walsender_bridge.runtime import status_file

    deadline = time.monotonic() + _CAPTURE_SECONDS
    while True:
        status = status_file.read(settings.capture_status(section), CaptureStatus)
        if status is None:
            return None
        # A capture that keeps ending is between two starts at times.
        if status.state in {"stopped", "streaming"} or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    position = stream_record.of_log(log, section.name)
    if status.error is None or status.error.code not in _FOR_GOOD or position is None:
        return None
    # An error about a history that the log no longer has is obsolete.
    return status.error.what if status.committed_lsn == position.last_end_lsn else None


def _lake(settings: "Config", log_id: str, *, dry_run: bool) -> list[dict[str, str]]:
    """Make the lake continue with this log, if it belongs to another one."""
    if settings.lake is None:
        return []
    from spark_consumers.lake.writer import adopt

    chain = lake_chain(settings.lake)
    error = adopt.trouble(chain, log_id)
    if error is None:
        return []
    if not dry_run and adopt.request(chain, log_id) is None:
        # The lake belongs to this log, and has another fault.
        raise error
    return [{"source": "[lake]", "reason": error.what}]
