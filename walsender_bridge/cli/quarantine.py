"""`tuskline quarantine`: rows with an unrepresentable value. `retry` and `skip` write a request into the lake."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    load_config,
)
from walsender_bridge.cli.table import Names, Timeout, Wait, configured_chain, full_names, submit
from walsender_bridge.errors import UsageError
from walsender_bridge.runtime.output import Output
from walsender_bridge.runtime.times import with_iso_times

if TYPE_CHECKING:
    from walsender_bridge.config import Config

quarantine_app = typer.Typer(
    help="List, retry or skip quarantined rows. See docs/quarantine.md.",
    no_args_is_help=True,
)
#: Characters of a value that a line of the table shows.
_SHOWN = 40


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(quarantine_app, name="quarantine")


@quarantine_app.command("list")
def list_rows(
    tables: Annotated[
        list[str] | None,
        typer.Argument(metavar="TABLE", help="Names of tables; default: all.", show_default=False),
    ] = None,
    config: ConfigPath = DEFAULT_CONFIG,
    limit: Annotated[int, typer.Option(help="Maximum number of rows of each table.", min=1)] = 1000,
    as_json: AsJson = False,
) -> None:
    """List the quarantined rows of the newest epoch. Each has its position, its values and the reason."""
    settings = load_config(config)
    chain = configured_chain(settings)
    from itertools import islice

    from spark_consumers.lake.epoch.quarantined_rows import rows_of

    chain.identity()
    head = chain.head()
    known = {} if head is None else head.tables
    names = full_names(settings, tables) if tables else sorted(known)
    rows = [
        row.to_json()
        for name in names
        if name in known
        for row in islice(rows_of(chain.root, name, known[name]), limit)
    ]
    Output(as_json=as_json).rows(
        "quarantine", [shown(row) for row in rows] if as_json else [_line(row) for row in rows]
    )


@quarantine_app.command()
def retry(
    tables: Names,
    config: ConfigPath = DEFAULT_CONFIG,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Retry the quarantined rows of tables. Rows that can be represented now move into the table with the next epoch."""
    settings = load_config(config)
    names = full_names(settings, tables)
    _request(settings, "retry", names, (), wait=wait, timeout=timeout, as_json=as_json)


@quarantine_app.command()
def skip(
    table: Annotated[
        str,
        typer.Argument(
            help="stream.schema.table, or schema.table if only one table has that name."
        ),
    ],
    rows: Annotated[
        list[str] | None,
        typer.Argument(metavar="ROW", help="Names of rows, from `quarantine list`."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All rows of the table.")] = False,
    config: ConfigPath = DEFAULT_CONFIG,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Accept that rows are missing in the lake. Later changes of these rows are still followed."""
    if bool(rows) == every:
        raise UsageError(
            "either rows or --all must be given",
            repair="`tuskline quarantine list` shows the names of the rows",
        )
    settings = load_config(config)
    names = full_names(settings, [table])
    _request(settings, "skip", names, rows or (), wait=wait, timeout=timeout, as_json=as_json)


def _request(
    settings: "Config",
    kind: str,
    names: Sequence[str],
    rows: Sequence[str],
    *,
    wait: bool,
    timeout: float,
    as_json: bool,
) -> None:
    chain = configured_chain(settings)
    outcomes = submit(chain, kind, names, rows, wait=wait, timeout=timeout, bars=not as_json)
    head = chain.head()
    tables = {} if head is None else head.tables
    left = {n: tables[n].quarantined_rows - tables[n].skipped_rows for n in names if n in tables}
    Output(as_json=as_json).rows(
        "tables", [{**each, "waiting_rows": left.get(each["table"], 0)} for each in outcomes]
    )


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row for `--json`, with its commit time (microseconds) as ISO 8601. Pure."""
    return with_iso_times(row, "commit_time", unit=1e-6)


def _line(row: dict[str, Any]) -> dict[str, Any]:
    columns = row["columns"]
    return {
        "table": row["table"],
        "row": row["row"],
        "state": row["state"],
        "lsn": row["lsn"],
        "key": ", ".join(f"{name}={value}" for name, value in row["key"].items()),
        "unrepresentable": "; ".join(f"{c['column']}={_short(c['value'])}" for c in columns),
        "reason": "; ".join(c["reason"] for c in columns),
    }


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
