"""`tuskline log trim`: removes committed entries that no consumer's lease holds."""

import re
from typing import Annotated

import typer

from walsender_bridge.cli.options import DEFAULT_CONFIG, AsJson, ConfigPath, load_config, named_log
from walsender_bridge.errors import UsageError
from walsender_bridge.runtime.output import Output

_UNITS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86_400}


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("trim")(log_trim)


def log_trim(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="Name of the stream.")],
    to_version: Annotated[
        int | None, typer.Option("--to-version", help="Trim up to this version, inclusive.", min=1)
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            "--older-than",
            help="Trim only entries that the log has had for longer than this, such as 90min, 1h or 7d.",
        ),
    ] = None,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Trim the entries of a stream that no consumer's lease holds.

    A reader without a lease that still needs them fails with TRIMMED (13).
    """
    if to_version is not None and older_than is not None:
        raise UsageError("--to-version and --older-than exclude each other", repair="choose one")
    seconds = None if older_than is None else duration(older_than)
    address = named_log(load_config(config), config)
    from walsender_bridge.change_log.operator_client import OperatorLog
    from walsender_bridge.runtime import json_model

    with OperatorLog(address) as log:
        answer = log.trim_stream(stream, to_version, seconds)
    output = Output(as_json=as_json)
    record = json_model.plain(answer)
    failed = [each.error.error() for each in answer.replicas if each.error is not None]
    if as_json:
        output.record({"stream": stream, **record})
    else:
        names = ("address", "low_offset", "entries", "bytes", "disk_bytes")
        trimmed = [each for each in record["replicas"] if each["error"] is None]
        output.rows("replicas", [{name: each[name] for name in names} for each in trimmed])
        for each in answer.held_by:
            published = "nothing" if each.version is None else f"version {each.version}"
            output.note(
                f"kept from offset {each.offset} on for consumer {each.consumer}: it has published {published},"
                f" and its lease lasts {each.lease_seconds:.0f} s"
            )
        for error in failed:
            output.error(error)
    if failed:
        raise typer.Exit(int(failed[0].cause))


def duration(text: str) -> float:
    """Seconds of `90min`, `1h`, `7d` or `30`. Raises `UsageError`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    unit = _UNITS.get((found[2] or "s") if found else "")
    if found is None or unit is None:
        raise UsageError(
            f"{text!r:.40} is not a duration",
            repair="write a number and s, min, h or d, such as 1h",
        )
    return float(found[1]) * unit
