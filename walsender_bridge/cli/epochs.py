"""`tuskline epochs`: the published epochs, where each cuts the streams, and pins, which keep some of them."""

from collections.abc import Iterator
from itertools import groupby, islice
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from walsender_bridge.cli.log_trim import duration
from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    lake_section,
    load_config,
)
from walsender_bridge.errors import LakeError, UsageError
from walsender_bridge.observability.lake_chain import lake_chain
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.runtime.output import Output
from walsender_bridge.runtime.times import iso_time

if TYPE_CHECKING:
    from spark_consumers.lake.manifest.chain import Chain, Manifest
    from spark_consumers.lake.writer.requests import Request

#: Spark by its reader of Delta, beside the engines that read Iceberg.
_DELTA: Final = "delta"

epochs_app = typer.Typer(
    help="List, show, pin and unpin the published epochs of the lake.",
    no_args_is_help=True,
)

PinName = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of the pin. Its tag is tuskline_pin_NAME.")
]
Wait = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Wait until the lake has carried out the request.")
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait.", min=0)]


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    app.add_typer(epochs_app, name="epochs")


@epochs_app.command("list")
def list_epochs(
    config: ConfigPath = DEFAULT_CONFIG,
    limit: Annotated[int, typer.Option(help="Number of epochs to list.", min=1)] = 20,
    before: Annotated[
        int | None,
        typer.Option(metavar="EPOCH", help="List epochs older than this one.", min=1),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="List all retained epochs.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the newest epochs, and the older ones that are pinned. The newest is last."""
    from spark_consumers.lake.manifest.pinned_links import pinned

    chain = lake_chain(lake_section(load_config(config)))
    head = chain.head()
    links = chain.newest_first(None if before is None else before - 1)
    found = list(islice(published(links), None if everything else limit + 1))
    # One more than wanted tells whether there are more.
    is_cut = not everything and len(found) > limit
    found = found[:limit] if is_cut else found
    if head is not None and before is None:
        there = {each.last.epoch for each in found}
        older = [Published(link, link) for link in pinned(chain.store, head)]
        found += [each for each in older if each.last.epoch not in there]
    found.sort(key=lambda each: each.last.epoch)
    rows = [_row(each, head or each.last, as_json=as_json) for each in found]
    output = Output(as_json=as_json)
    output.rows("epochs", rows)
    if is_cut and not as_json:
        oldest = min(each.last.epoch for each in found[-limit:])
        output.note(f"older epochs: --before {oldest}, or --all")


class Published(NamedTuple):
    """An epoch: its first link, which published it, and its last one, which counts."""

    first: "Manifest"
    last: "Manifest"


def published(links: "Iterator[Manifest]") -> Iterator[Published]:
    """The epochs of these links; newest first, as the links are. Of the oldest epoch, some may have expired."""
    for _, group in groupby(links, key=lambda link: link.epoch):
        of_one = list(group)
        yield Published(of_one[-1], of_one[0])


def _row(epoch: Published, head: "Manifest", *, as_json: bool) -> dict[str, Any]:
    """The epoch in a list; its `changes` are not known if the link that published it has expired."""
    first, last = epoch
    names = list(_pins(head, last.epoch))
    return {
        "epoch": last.epoch,
        "link": last.link,
        "term": last.term,
        "published_at": iso_time(first.published_at),
        "changes": first.changes if first.previous_epoch < first.epoch else None,
        "tables": len(last.tables),
        "pins": names if as_json else ", ".join(names) or None,
    }


@epochs_app.command("show")
def show(
    epoch: Annotated[
        int, typer.Argument(metavar="EPOCH", help="Number of the epoch, from `epochs list`.")
    ],
    config: ConfigPath = DEFAULT_CONFIG,
    sql: Annotated[
        str | None,
        typer.Option(
            "--sql",
            metavar="ENGINE",
            help="Print statements that read this epoch in trino, duckdb, spark, pyiceberg, or delta (Delta tables in Spark).",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show one epoch: its stream positions, tables and pins."""
    from spark_consumers.lake.manifest.pinned_links import at_epoch

    chain = lake_chain(lake_section(load_config(config)))
    manifest = at_epoch(chain, epoch)
    output = Output(as_json=as_json)
    head = chain.head() or manifest
    if sql is not None:
        _print_statements(output, chain, sql, manifest, head)
        return
    record = shown(manifest, head)
    if as_json:
        output.record(record)
        return
    streams, tables, pins = (record.pop(name) for name in ("streams", "tables", "pins"))
    totals = ("epoch", "link", "term", "published_at", "rows", "changes", "not_copied")
    output.record({name: record[name] for name in totals})
    output.rows("streams", [{"stream": name, **each} for name, each in streams.items()])
    columns = ("state", "rows", "as_of", "snapshot_id")
    output.rows(
        "tables",
        [{"table": name, **{c: each[c] for c in columns}} for name, each in tables.items()],
    )
    output.rows("pins", pins)


def shown(manifest: "Manifest", head: "Manifest") -> dict[str, Any]:
    """A manifest as plain values, with LSNs as PostgreSQL writes them and times as ISO 8601; its pins are those of the head.

    `as_of` is the epoch of a table's rows, as `tuskline table list` shows it.
    """
    record = manifest.to_json()
    del record["steady_at"]  # seconds of a clock that readers do not have
    record["published_at"] = iso_time(manifest.published_at)
    for each in record["streams"].values():
        each["lsn"] = format_lsn(each["lsn"])
        each["commit_time"] = iso_time(each["commit_time"] / 1e6)
    for group in ("tables", "copies"):
        for table in record[group].values():
            table["start_lsn"] = format_lsn(table["start_lsn"])
    for table in record["tables"].values():
        table["as_of"] = table["as_of"] or manifest.epoch
    record["pins"] = [
        {
            "pin": name,
            "state": pin.state,
            "pinned_at": iso_time(pin.at),
            "expires_at": iso_time(pin.expires_at) if pin.expires_at else None,
        }
        for name, pin in head.pins.items()
        if pin.epoch == manifest.epoch
    ]
    return record


def _pins(head: "Manifest", epoch: int) -> dict[str, Any]:
    """The head's pins that keep this epoch, by name."""
    return {n: pin for n, pin in head.pins.items() if pin.epoch == epoch and pin.keeps_tags}


def _print_statements(
    output: Output, chain: "Chain", engine: str, manifest: "Manifest", head: "Manifest"
) -> None:
    """What reads the tables of an epoch in another engine; those that `read` leaves out are named."""
    from spark_consumers.lake.catalog import rest_statements
    from spark_consumers.lake.catalog import statements as texts
    from spark_consumers.lake.catalog.open_catalog import is_guarded, recorded
    from spark_consumers.lake.delta_log.statements import delta_statements

    engines = (*texts.ENGINES, _DELTA)
    if engine not in engines:
        raise UsageError(f"unknown engine {engine!r}", repair=f"use one of {', '.join(engines)}")
    tables, left_out = cut_tables(manifest, head)
    catalog = recorded(chain)
    if engine == _DELTA:
        first = ""
        made, without = delta_statements(chain.root, manifest, tables)
        left_out |= without
    elif catalog is None:
        made, first = texts.statements(engine, str(chain.root), tables), texts.preamble(engine)
    else:
        made = rest_statements.statements(engine, catalog, tables)
        first = rest_statements.preamble(engine, catalog, guarded=is_guarded(catalog))
    if output.as_json:
        output.record(
            {
                "epoch": manifest.epoch,
                "engine": engine,
                "preamble": first,
                "statements": [{"table": name, "statement": text} for name, text in made.items()],
                "left_out": left_out,
            }
        )
        return
    lines = [first, *made.values()]
    output.text("\n".join(line for line in lines if line))
    for name, reason in left_out.items():
        output.note(f"{name} is left out: {reason}")


def cut_tables(manifest: "Manifest", head: "Manifest") -> tuple[dict[str, Any], dict[str, str]]:
    """The tables of an epoch for `statements`, and those that `read` leaves out, with the reasons. Pure."""
    from spark_consumers.lake.catalog.statements import CutTable
    from spark_consumers.lake.manifest.pin import PINNED, tag_of
    from spark_consumers.lake.reader import view_names
    from spark_consumers.lake.tables.states import is_behind

    pins = [n for n, pin in _pins(head, manifest.epoch).items() if pin.state == PINNED]
    tag = tag_of(min(pins)) if pins else None
    views = {name: view for view, name in view_names(manifest.readable).items()}
    behind = {n: t for n, t in manifest.readable.items() if is_behind(manifest, t)}
    now = {name: table.path for name, table in head.readable.items()}
    tables = {
        name: CutTable(views[name], table.path, table.snapshot_id, now.get(name) == table.path, tag)
        for name, table in sorted(manifest.readable.items())
        if name not in behind
    }
    reasons = {
        name: f"its rows are those of epoch {table.as_of}: {table.reason or table.state}"
        for name, table in behind.items()
    }
    return tables, reasons


@epochs_app.command()
def pin(
    name: PinName,
    epoch: Annotated[
        int | None,
        typer.Option(
            help="Number of the epoch; default: the newest, or the one that NAME pins.", min=1
        ),
    ] = None,
    keep_for: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="DURATION",
            help="Release the pin after this time, such as 30d; default: never.",
        ),
    ] = None,
    config: ConfigPath = DEFAULT_CONFIG,
    wait: Wait = True,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Keep an epoch under a name, beyond [lake] retention.

    Each of its tables gets the tag tuskline_pin_NAME. To change how long a pin is kept, repeat the command.
    """
    from spark_consumers.lake.manifest.pin import checked_name
    from spark_consumers.lake.manifest.pinned_links import at_epoch
    from spark_consumers.lake.writer import requests

    chain = lake_chain(lake_section(load_config(config)))
    seconds = duration(keep_for) if keep_for is not None else 0.0
    if keep_for is not None and not seconds:
        raise UsageError("--for must be longer than 0", repair="omit it to keep the epoch for ever")
    chain.identity()
    number = epoch or _default_epoch(chain, checked_name(name))
    at_epoch(chain, number)  # the driver looks again; this one need not be waited for
    request = requests.ask(chain, requests.PIN, (), pin=name, epoch=number, seconds=seconds)
    _done(chain, request, {"pin": name, "epoch": number}, wait, timeout, as_json=as_json)


def _default_epoch(chain: "Chain", name: str) -> int:
    """The epoch that is meant where none is named. Raises `LakeError` if none is published."""
    head = chain.head()
    if head is None:
        raise LakeError(
            "no epoch is published yet",
            where=chain.store.location,
            repair="check that `tuskline lake run` is running",
        )
    known = head.pins.get(name)
    return known.epoch if known is not None and known.keeps_tags else head.epoch


@epochs_app.command()
def unpin(
    name: PinName,
    config: ConfigPath = DEFAULT_CONFIG,
    wait: Wait = True,
    timeout: Timeout = 600.0,
    as_json: AsJson = False,
) -> None:
    """Release a pin, and remove its tags.

    Its epoch expires if it is past [lake] retention.
    """
    from spark_consumers.lake.manifest.pin import checked_name
    from spark_consumers.lake.writer import requests

    chain = lake_chain(lake_section(load_config(config)))
    request = requests.ask(chain, requests.UNPIN, (), pin=checked_name(name))
    _done(chain, request, {"pin": name}, wait, timeout, as_json=as_json)


def _done(
    chain: "Chain",
    request: "Request",
    record: dict[str, Any],
    wait: bool,
    timeout: float,
    *,
    as_json: bool,
) -> None:
    """Print what came of a request, once it is carried out if `wait`."""
    from spark_consumers.lake.writer import requests

    outcome = "requested"
    if wait:
        outcome = requests.wait(chain, request, timeout=timeout)[request.pin]
    Output(as_json=as_json).record({**record, "outcome": outcome, "request": request.id})
