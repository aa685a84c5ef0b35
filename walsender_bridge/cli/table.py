"""`tuskline table`: list, add, pause, resume, resync, drop. All but `list` write a request into the lake."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    Admin,
    AsJson,
    ConfigPath,
    checked_admin,
    lake_section,
    load_config,
)
from walsender_bridge.errors import UsageError
from walsender_bridge.observability.lake_chain import lake_chain
from walsender_bridge.provisioning.configured import capture_source
from walsender_bridge.runtime.output import Output
from walsender_bridge.runtime.times import with_iso_times

if TYPE_CHECKING:
    from spark_consumers.lake.manifest.chain import Chain
    from walsender_bridge.config import Config

table_app = typer.Typer(
    help="List, add, pause, resume, resync or drop tables of the lake. See docs/tables.md.",
    no_args_is_help=True,
)

Names = Annotated[
    list[str],
    typer.Argument(
        metavar="TABLE",
        help="stream.schema.table, or schema.table if only one table has that name.",
    ),
]
Wait = Annotated[
    bool, typer.Option("--wait", help="Wait until the lake has carried out the request.")
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait.", min=0)]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(table_app, name="table")


@table_app.command("list")
def list_tables(config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """List the tables with their states. Each has the epoch of its rows, the reason, and the progress of a copy."""
    chain = configured_chain(load_config(config))
    from spark_consumers.lake.status import read_status, table_rows

    chain.identity()
    head = chain.head()
    rows = [] if head is None else table_rows(head, read_status(chain), time.time())
    output = Output(as_json=as_json)
    output.rows("tables", [shown(row) for row in rows] if as_json else [_line(row) for row in rows])
    for row in rows:
        why = "; ".join(filter(None, (row["reason"], row["resync"])))
        if why and not as_json:
            output.note(f"{row['table']}: {why}")
        if row["history"] is not None and not as_json:
            output.note(f"{row['table']}: {_since(row['history'])}")
        if row["lake_name"] != row["table"] and not as_json:
            output.note(f"{row['table']} is {row['lake_name']} in the lake")


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """A row for `--json`, with times as ISO 8601. Pure."""
    copy = row["copy"]
    return {**row, "copy": None if copy is None else with_iso_times(copy, "began_at")}


def _line(row: dict[str, Any]) -> dict[str, Any]:
    """The columns that fit on a line."""
    copy = row["copy"]
    return {
        **{name: row[name] for name in ("table", "state", "rows", "quarantined_rows", "as_of")},
        "copy": f"{copy['pieces_done']}/{copy['pieces']} parts" if copy else None,
    }


def _since(history: dict[str, Any]) -> str:
    """Where a history begins, for people."""
    at = f" ({history['begins_at']})" if history["begins_at"] else ""
    return f"its history begins at {history['begins_at_lsn']}{at}, with its last copy"


@table_app.command()
def add(
    tables: Names,
    config: ConfigPath = DEFAULT_CONFIG,
    admin: Admin = None,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Add tables to the publication, and copy them into the lake."""
    settings = load_config(config)
    lake_section(settings)  # before the publication changes
    admin = checked_admin(admin)
    from walsender_bridge.postgres.protocol.relation_name import split_relation
    from walsender_bridge.postgres.table_patterns import Choice
    from walsender_bridge.provisioning.table import add_table

    # Not a table of that name that the lake has: this one it does not have yet.
    names = full_names(settings, tables, in_lake=False)
    for name in names:
        stream, _, table = name.partition(".")
        section = next(source for source in settings.source if source.name == stream)
        for created in add_table(capture_source(section), table, admin):
            Output(as_json=as_json).note(f"created: {created}")
        if not Choice.of(section.tables).means(*split_relation(table)):
            Output(as_json=as_json).note(
                f"add {table!r} to `tables` of source {stream!r} in {config} as well"
            )
    _request(settings, "add", names, wait=wait, timeout=timeout, as_json=as_json)


@table_app.command()
def pause(
    tables: Names,
    config: ConfigPath = DEFAULT_CONFIG,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Stop applying changes to tables. Their rows stay as they are; other tables continue."""
    settings = load_config(config)
    names = full_names(settings, tables)
    _request(settings, "pause", names, wait=wait, timeout=timeout, as_json=as_json)


@table_app.command()
def resume(
    tables: Names,
    config: ConfigPath = DEFAULT_CONFIG,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Continue to apply changes to paused tables. Tables that could not follow are retried."""
    settings = load_config(config)
    names = full_names(settings, tables)
    _request(settings, "resume", names, wait=wait, timeout=timeout, as_json=as_json)


@table_app.command()
def resync(
    tables: Names,
    config: ConfigPath = DEFAULT_CONFIG,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Copy tables again. Their old versions stay readable until the new copies are complete."""
    settings = load_config(config)
    names = full_names(settings, tables)
    _request(settings, "resync", names, wait=wait, timeout=timeout, as_json=as_json)


@table_app.command()
def drop(
    tables: Names,
    config: ConfigPath = DEFAULT_CONFIG,
    wait: Wait = False,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Remove tables that left their publication from the lake.

    Their names for other engines are removed, too. Earlier epochs keep the tables until they exceed [lake] retention;
    then their files are removed.
    """
    settings = load_config(config)
    head = configured_chain(settings).head()
    # The source of a table may have been removed from the configuration.
    known = {name for name in tables if head is not None and name in head.tables}
    names = [name if name in known else full_names(settings, [name])[0] for name in tables]
    _request(settings, "drop", names, wait=wait, timeout=timeout, as_json=as_json)


def _request(
    settings: "Config",
    kind: str,
    names: Sequence[str],
    *,
    wait: bool,
    timeout: float,
    as_json: bool,
) -> None:
    rows = submit(
        configured_chain(settings), kind, names, wait=wait, timeout=timeout, bars=not as_json
    )
    Output(as_json=as_json).rows("tables", rows)


def submit(
    chain: "Chain",
    kind: str,
    names: Sequence[str],
    rows: Sequence[str] = (),
    *,
    wait: bool,
    timeout: float,
    bars: bool,
) -> list[dict[str, Any]]:
    """Write a request into the lake. Returns a record for each table, with its outcome if `wait`."""
    from spark_consumers.lake.status import read_status
    from spark_consumers.lake.writer import requests
    from walsender_bridge.cli.copy_bars import CopyBars

    request = requests.ask(chain, kind, names, rows)
    outcomes = dict.fromkeys(names, "requested")
    if wait:
        with CopyBars(shown=sys.stderr.isatty() and bars) as shown:
            outcomes = requests.wait(
                chain,
                request,
                timeout=timeout,
                polling=lambda: shown.show(read_status(chain).copying),
            )
    return [{"table": n, "outcome": o, "request": request.id} for n, o in outcomes.items()]


def configured_chain(settings: "Config") -> "Chain":
    """The configured lake's chain. Raises `LakeError`."""
    return lake_chain(lake_section(settings))


def full_names(settings: "Config", names: Sequence[str], *, in_lake: bool = True) -> list[str]:
    """`stream.schema.table` for each name. Raises `UsageError`.

    `schema.table` is enough with a single source, and, for tables that are `in_lake`, where the lake knows only one. A table may be
    named as its source or as the lake names it.
    """
    streams = [source.name for source in settings.source]
    known = _known(settings) if in_lake else {}
    found: list[str] = []
    for name in names:
        stream, _, rest = name.partition(".")
        if stream in streams and "." in rest:
            found.append(known.get(name, name))
        elif len(streams) == 1 and "." in name:
            full = f"{streams[0]}.{name}"
            found.append(known.get(full, full))
        else:
            found.append(_only_table(name, streams, known))
    return list(dict.fromkeys(found))


def _known(settings: "Config") -> dict[str, str]:
    """The names at their sources of the lake's tables, copied or not, by these names and by those in the lake. If a name is both, that at the source counts."""
    head = configured_chain(settings).head()
    if head is None:
        return {}
    names = {*head.tables, *head.copies, *head.not_copied}
    return {**head.at_sources, **{name: name for name in names}}


def _only_table(name: str, streams: Sequence[str], known: Mapping[str, str]) -> str:
    """The only table of this name in the lake, copied or not, among those of the configured sources."""
    found = sorted({known[f"{each}.{name}"] for each in streams if f"{each}.{name}" in known})
    if len(found) == 1:
        return found[0]
    raise UsageError(
        f"table name {name!r} is ambiguous",
        repair=f"name one of {', '.join(found)}"
        if found
        else f"write stream.schema.table; the streams are {', '.join(streams)}",
    )
