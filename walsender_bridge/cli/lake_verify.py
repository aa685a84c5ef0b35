"""`tuskline lake verify`: compares every file of the lake with its checksums."""

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    AsJson,
    ConfigPath,
    lake_section,
    load_config,
)
from walsender_bridge.errors import CorruptError
from walsender_bridge.observability.lake_chain import lake_chain
from walsender_bridge.runtime.output import Output


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("verify")(lake_verify)


def lake_verify(config: ConfigPath = DEFAULT_CONFIG, as_json: AsJson = False) -> None:
    """Verify every file of the lake against its checksums. Exit code 12: a file is damaged or missing."""
    lake = lake_section(load_config(config))
    from spark_consumers.lake.verify import verify
    from walsender_bridge.observability.verify_bar import verify_bar

    output = Output(as_json=as_json)
    with verify_bar(output) as progress:
        found = verify(lake_chain(lake), progress)
    output.record(
        {
            "links": found.links,
            "files": found.files,
            "bytes": found.bytes,
            "without_checksums": found.unsealed,
            "damaged": len(found.errors),
            **({"errors": [error.to_wire() for error in found.errors]} if as_json else {}),
        }
    )
    if not found.errors:
        return
    if not as_json:
        for error in found.errors:
            output.error(error)
    raise CorruptError(
        f"{len(found.errors)} files or snapshots of the lake are damaged or missing",
        where=lake.uri,
        repair="restore them from a backup, or copy their tables again: tuskline table resync",
    )
