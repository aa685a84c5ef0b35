"""`tuskline epochs`: the published epochs, and where each cuts the streams."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    lake_section,
    load_config,
)
from walsender_bridge.observability.lake_chain import lake_chain
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.runtime.output import Output
from walsender_bridge.runtime.times import iso_time

if TYPE_CHECKING:
    from spark_consumers.lake.manifest.chain import Manifest

epochs_app = typer.Typer(
    help="List and show the published epochs of the lake.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the group to the command line."""
    app.add_typer(epochs_app, name="epochs")


@epochs_app.command("list")
def list_epochs(
    config: ConfigPath = DEFAULT_CONFIG,
    limit: Annotated[int, typer.Option(help="Number of epochs to list.", min=1)] = 20,
    as_json: AsJson = False,
) -> None:
    """List the newest published epochs."""
    chain = lake_chain(lake_section(load_config(config)))
    rows = [
        {
            "epoch": manifest.epoch,
            "link": manifest.link,
            "term": manifest.term,
            "published_at": iso_time(manifest.published_at),
            "tables": len(manifest.tables),
        }
        for manifest in chain.newest(limit)
    ]
    Output(as_json=as_json).rows("epochs", rows)


@epochs_app.command("show")
def show(
    epoch: Annotated[int, typer.Argument(help="Number of the epoch, from `epochs list`.")],
    config: ConfigPath = DEFAULT_CONFIG,
    as_json: AsJson = False,
) -> None:
    """Show one epoch: stream positions and table snapshots."""
    chain = lake_chain(lake_section(load_config(config)))
    record = shown(chain.at_epoch(epoch))
    output = Output(as_json=as_json)
    if as_json:
        output.record(record)
        return
    streams, tables = record.pop("streams"), record.pop("tables")
    totals = ("epoch", "link", "term", "published_at", "rows", "changes", "not_copied")
    output.record({name: record[name] for name in totals})
    output.rows("streams", [{"stream": name, **each} for name, each in streams.items()])
    columns = ("state", "rows", "as_of", "snapshot_id")
    output.rows(
        "tables",
        [{"table": name, **{c: each[c] for c in columns}} for name, each in tables.items()],
    )


def shown(manifest: "Manifest") -> dict[str, Any]:
    """A manifest as plain values, with LSNs as PostgreSQL writes them and times as ISO 8601."""
    record = manifest.to_json()
    del record["steady_at"]  # seconds of a clock that readers do not have
    record["published_at"] = iso_time(manifest.published_at)
    for each in record["streams"].values():
        each["lsn"] = format_lsn(each["lsn"])
        each["commit_time"] = iso_time(each["commit_time"] / 1e6)
    for group in ("tables", "copies"):
        for table in record[group].values():
            table["start_lsn"] = format_lsn(table["start_lsn"])
    return record
