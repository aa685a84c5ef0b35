"""`tuskline flush`: it waits while its parts are being started, and ends at once when one of them has ended for good."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Final

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    lake_section,
    load_config,
)
from walsender_bridge.errors import (
    AuthenticationError,
    Cause,
    ConnectionFailedError,
    DeadlineError,
    TusklineError,
    UnavailableError,
    from_wire,
)
from walsender_bridge.runtime import logs
from walsender_bridge.runtime.output import Output

if TYPE_CHECKING:
    from walsender_bridge.config import Config, SourceSection

#: Seconds between two tries to publish a table that is locked.
_LOOK_AGAIN: Final = 0.5
#: Seconds between two notes of what is waited for.
_SAY_AGAIN: Final = 5.0
#: Of what the lake says of itself: what no other try changes.
_FINAL: Final = (Cause.CONFIG, Cause.LAKE, Cause.DIVERGED)


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("flush")(flush)


def flush(
    config: ConfigPath = DEFAULT_CONFIG,
    timeout: Annotated[float, typer.Option(help="Seconds to wait.", min=0)] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Wait until everything committed before this call is readable in the lake, in every published table."""
    settings = load_config(config)
    lake = lake_section(settings)
    from spark_consumers.lake.flush import flush as flush_sources
    from spark_consumers.lake.tables.sources import Source

    began, output = time.monotonic(), Output(as_json=as_json)
    logs.export_format(settings.logs.format)
    for section in settings.source:
        for note in publish_new(section, began + timeout):
            output.note(note)
    epoch = flush_sources(
        lake.uri,
        settings.log_address,
        [Source(each.name, each.dsn, each.publication_name) for each in settings.source],
        timeout=max(0.0, began + timeout - time.monotonic()),
        parts=PartsHere(settings),
        waiting=_Waiting(output).say,
    )
    output.record({"epoch": epoch, "seconds": round(time.monotonic() - began, 3)})


def publish_new(section: "SourceSection", deadline: float) -> tuple[str, ...]:
    """Publish what capture would publish with its next look, as it would; the notes of what stays out of the lake.

    `deadline`: of `time.monotonic`. Raises `DeadlineError` for a table that is locked until then. A server that cannot be
    reached is none of this: the flush itself names it.
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
                        f"not published yet: {', '.join(left)}",
                        where=here.where,
                        repair="end the transactions that lock them, or wait longer with --timeout",
                    )
                time.sleep(_LOOK_AGAIN)
            return table_notes.notes(connection, here)
    except (ConnectionFailedError, AuthenticationError, UnavailableError):
        return ()


class _Waiting:
    """Names, on standard error, what is waited for, when that changes."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._said: dict[str, str] = {}
        self._not_before = time.monotonic() + _SAY_AGAIN

    def say(self, missing: Mapping[str, str]) -> None:
        """Called again and again with the tables that are not there yet, and why."""
        if time.monotonic() < self._not_before or missing == self._said:
            return
        self._not_before = time.monotonic() + _SAY_AGAIN
        for name, why in sorted(missing.items()):
            if self._said.get(name) != why:
                self._output.note(f"waiting for {name}: {why}")
        self._said = dict(missing)


class PartsHere:
    """What the processes on this machine say of themselves."""

    def __init__(self, settings: "Config") -> None:
        self._settings = settings
        self._began = time.time()

    def starting(self) -> bool:
        """Whether the log and its captures run here, or are about to."""
        from walsender_bridge.runtime import pid_file, processes
        from walsender_bridge.runtime.supervisor import read_states

        folder = self._settings.run_dir
        if pid_file.owner(folder) is not None:
            return True
        return processes.alive(read_states(folder, "bridge").get("pid", 0))

    def hopeless(self) -> TusklineError | None:
        """Why a capture has ended for good, or why the lake cannot go on before somebody has acted."""
        from walsender_bridge.observability import lake_status
        from walsender_bridge.runtime import status_file
        from walsender_bridge.runtime.supervisor import read_states

        settings = self._settings
        children = read_states(settings.run_dir, "bridge").get("children", {})
        for section in settings.source:
            told = status_file.read(settings.capture_status(section))
            if not told.get("error") or told.get("state") != "stopped":
                continue
            # What an earlier one said may have been repaired: the one that starts says it again.
            now = told.get("updated_at", 0.0) >= self._began
            if now or children.get(f"capture-{section.name}", {}).get("state") == "ended":
                return from_wire(told["error"])
        trouble = lake_status.said(settings.run_dir, self._began)
        return trouble if trouble is not None and trouble.cause in _FINAL else None
