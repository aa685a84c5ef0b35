"""`tuskline flush` and `tuskline sync`: wait while the parts start, and fail at once when one of them has stopped for good."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    lake_section,
    load_config,
    need_here,
)
from walsender_bridge.errors import (
    AuthenticationError,
    Cause,
    ConnectionFailedError,
    DeadlineError,
    TusklineError,
    UnavailableError,
)
from walsender_bridge.observability.lake_chain import store_options
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.output import Output

if TYPE_CHECKING:
    from walsender_bridge.config import Config, SourceSection

#: Seconds between two attempts to publish a table that is locked.
_RETRY_SECONDS: Final = 0.5
#: Seconds between two notes of what flush waits for.
_NOTE_SECONDS: Final = 5.0
#: Causes reported by the lake's job that a retry does not change.
_FINAL: Final = (Cause.CONFIG, Cause.LAKE, Cause.DIVERGED)
#: Seconds within which a live job that has failed is expected to report its next attempt.
_NEXT_WORD_SECONDS: Final = 20.0


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("flush")(flush)
    app.command("sync")(sync)


Timeout = Annotated[float, typer.Option(help="Seconds to wait.", min=0)]
Tokens = Annotated[
    list[str] | None,
    typer.Option(
        "--token",
        help="A token of tuskline.flush_token(): fail unless its transaction has committed. May be repeated.",
    ),
]


def flush(
    config: ConfigPath = DEFAULT_CONFIG,
    timeout: Timeout = 600.0,
    token: Tokens = None,
    as_json: AsJson = False,
) -> None:
    """Wait until all committed changes are readable in the lake.

    This covers all that was committed before the call, in every published table. An epoch is written at once.
    """
    _wait(config, timeout, token or [], as_json=as_json, forced=True)


def sync(
    config: ConfigPath = DEFAULT_CONFIG,
    timeout: Timeout = 600.0,
    token: Tokens = None,
    as_json: AsJson = False,
) -> None:
    """Wait, as flush does, but without forcing an epoch.

    The lake writes the epoch in its own time: this may take [lake] epoch_interval seconds and longer.
    """
    _wait(config, timeout, token or [], as_json=as_json, forced=False)


def _wait(config: Path, timeout: float, tokens: list[str], *, as_json: bool, forced: bool) -> None:
    settings = load_config(config)
    lake = lake_section(settings)
    need_here(settings, "lake")
    from spark_consumers.lake import flush as of_lake
    from spark_consumers.lake.tables.sources import Source

    began, output = time.monotonic(), Output(as_json=as_json)
    logs.export_format(settings.logs.format)
    sources = [Source(each.name, each.dsn, each.publication_name) for each in settings.source]
    for token in tokens:
        of_lake.check_token(token, sources)
    # The publication belongs to the bridge: where the lake alone is, its `tables` may be others.
    for section in settings.source if "bridge" in settings.parts else ():
        for note in publish_new(section, began + timeout):
            output.note(note)
    left = max(0.0, began + timeout - time.monotonic())
    parts, waiting, store = PartsHere(settings), _Waiting(output).note, store_options(lake)
    if forced:
        epoch = of_lake.flush(
            lake.uri,
            settings.log_address,
            sources,
            timeout=left,
            parts=parts,
            waiting=waiting,
            store=store,
        )
    else:
        epoch = of_lake.sync(
            lake.uri, sources, timeout=left, parts=parts, waiting=waiting, store=store
        )
    output.record({"epoch": epoch, "seconds": round(time.monotonic() - began, 3)})


def publish_new(section: "SourceSection", deadline: float) -> tuple[str, ...]:
    """Publish the tables that capture would publish at its next poll. Returns notes about tables that stay out of the lake.

    `deadline`: of `time.monotonic`. Raises `DeadlineError` for a table that stays locked until then. A server that cannot be
    reached is not an error here: the flush itself reports it.
    """
    from walsender_bridge.capture import publication, source
    from walsender_bridge.provisioning import table_notes
    from walsender_bridge.provisioning.configured import capture_source

    here = capture_source(section)
    try:
        with source.connect(here) as connection:
            while left := publication.follow(connection, here):
                if time.monotonic() >= deadline:
                    raise DeadlineError(
                        f"tables are locked and not published yet: {', '.join(left)}",
                        where=here.where,
                        repair="end the transactions that lock them, or wait longer with --timeout",
                    )
                time.sleep(_RETRY_SECONDS)
            return table_notes.notes(connection, here)
    except (ConnectionFailedError, AuthenticationError, UnavailableError):
        return ()


class _Waiting:
    """Reports on standard error which tables the flush waits for, when that changes."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._noted: dict[str, str] = {}
        self._not_before = time.monotonic() + _NOTE_SECONDS

    def note(self, missing: Mapping[str, str]) -> None:
        """Called repeatedly with the tables that are not readable yet, and the reasons."""
        if time.monotonic() < self._not_before or missing == self._noted:
            return
        self._not_before = time.monotonic() + _NOTE_SECONDS
        for name, why in sorted(missing.items()):
            if self._noted.get(name) != why:
                self._output.note(f"waiting for {name}: {why}")
        self._noted = dict(missing)


class PartsHere:
    """The state of the processes on this machine, from their status files."""

    def __init__(self, settings: "Config") -> None:
        self._settings = settings
        self._began = time.time()

    def starting(self) -> bool:
        """Whether the log and its captures run or start here."""
        from walsender_bridge.runtime import pid_file, processes
        from walsender_bridge.runtime.supervisor import read_states

        folder = self._settings.run_dir
        if pid_file.owner(folder) is not None:
            return True
        return processes.alive(read_states(folder, "bridge").pid)

    def hopeless(self) -> TusklineError | None:
        """The error with which a capture stopped for good, or that keeps the lake from continuing until an operator acts."""
        from walsender_bridge.capture.status_record import CaptureStatus
        from walsender_bridge.observability import lake_status
        from walsender_bridge.runtime import status_file
        from walsender_bridge.runtime.supervisor import read_states

        settings = self._settings
        children = read_states(settings.run_dir, "bridge").children
        for section in settings.source:
            status = status_file.read(settings.capture_status(section), CaptureStatus)
            if status is None or status.error is None or status.state != "stopped":
                continue
            # The cause of an earlier end may have been repaired; a capture that starts reports it again.
            current = status.updated_at >= self._began
            child = children.get(f"capture-{section.name}")
            if current or (child is not None and child.state == "ended"):
                return status.error.error()
        # What failed before may have been repaired, too: the flush has the job try at once.
        waited_enough = time.time() >= self._began + _NEXT_WORD_SECONDS
        error = lake_status.reported_error(
            settings.run_dir, self._began, older_of_a_live_job=waited_enough
        )
        return error if error is not None and error.cause in _FINAL else None
