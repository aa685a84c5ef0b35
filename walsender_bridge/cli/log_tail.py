"""`tuskline log tail`: the committed transactions of a stream, as lines or as JSON lines."""

import os
import sys
from typing import Annotated

import typer

from walsender_bridge.cli.options import DEFAULT_CONFIG, ConfigPath, load_config, named_log
from walsender_bridge.errors import UsageError
from walsender_bridge.runtime.output import Output


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("tail")(log_tail)


def log_tail(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="Name of the stream.")],
    from_version: Annotated[
        int | None,
        typer.Option(
            "--from-version",
            help="Begin with this version; default: the oldest that is retained, or with --follow the next one.",
            min=1,
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Continue with new transactions until interrupted."),
    ] = False,
    seconds: Annotated[
        float | None, typer.Option(help="With --follow: end after this number of seconds.", min=0)
    ] = None,
    relations: Annotated[
        str | None,
        typer.Option(
            help="Show only these tables, and transactions that change one of them, such as public.orders,public.audit."
        ),
    ] = None,
    rows: Annotated[
        bool, typer.Option("--rows", help="Show each row before its transaction.")
    ] = False,
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per line.")
    ] = False,
) -> None:
    """Show the committed transactions of a stream, oldest first."""
    if seconds is not None and not follow:
        raise UsageError("--seconds is for --follow", repair="add --follow")
    address = named_log(load_config(config), config)
    from walsender_bridge.observability import log_tail as tailing

    output = Output(as_json=as_json)
    options = tailing.TailOptions(
        stream=stream,
        from_version=from_version,
        follow=follow,
        seconds=seconds,
        relations=None if relations is None else _names(relations),
        rows=rows,
    )
    try:
        for each in tailing.tail(address, options, output.note):
            if as_json:
                output.record(tailing.record(each))
            else:
                output.line(tailing.line(each))
    except BrokenPipeError:
        # Its reader, such as `head`, has enough; the interpreter must not fail at its own last flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        if not follow:
            raise


def _names(relations: str) -> frozenset[str]:
    names = frozenset(filter(None, (each.strip() for each in relations.split(","))))
    bare = sorted(name for name in names if "." not in name)
    if bare or not names:
        raise UsageError(
            f"{(bare or [relations])[0]!r:.60} does not name a table with its schema",
            repair="name tables such as public.orders",
        )
    return names
