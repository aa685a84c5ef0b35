"""`tuskline log verify`: the invariants of the change log, checked over all replicas."""

from pathlib import Path
from typing import Annotated

import typer

from walsender_bridge.cli.options import DEFAULT_CONFIG, AsJson, ConfigPath, load_config, named_log
from walsender_bridge.errors import UsageError
from walsender_bridge.runtime.output import Output


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(log_verify)


def log_verify(
    streams: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STREAM", help="Names of streams; default: all.", show_default=False
        ),
    ] = None,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline",
            help="Read the files of the data directories, whose log servers must be stopped.",
        ),
    ] = False,
    data_dir: Annotated[
        list[Path] | None,
        typer.Option(
            "--data-dir",
            help="With --offline: verify this data directory instead of the configured one. Repeatable.",
        ),
    ] = None,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Verify every entry of every replica, and compare the replicas. Exit code 12: damaged, 10: they differ."""
    if data_dir and not offline:
        raise UsageError("--data-dir is for --offline", repair="add --offline")
    output = Output(as_json=as_json)
    folders, address = data_dir or [], ""
    if not data_dir:
        settings = load_config(config)
        folders = [each.data_dir for each in settings.hosted_log_servers]
        address = "" if offline else named_log(settings, config)
    from walsender_bridge.observability import log_verify as verifying

    if offline:
        report = verifying.verify_stopped(folders, streams or [], output)
    else:
        report = verifying.verify_running(address, streams or [], output)
    if as_json:
        output.record(report.record())
    else:
        output.rows("replicas", report.rows)
        output.record(
            {
                "violations": len(report.violations),
                "global_ranges_to_version": report.version,
            }
        )
        for note in report.notes:
            output.note(note)
    for violation in report.violations:
        if not as_json:
            output.error(violation.error())
    if report.violations:
        raise typer.Exit(int(report.violations[0].cause))
