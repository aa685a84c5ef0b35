"""`tuskline init` and `tuskline detach`."""

from collections.abc import Mapping, Sequence
from typing import Any

import typer

from walsender_bridge.commands.options import (
    DEFAULT_CONFIG,
    Admin,
    AsJson,
    ConfigPath,
    OneSource,
    checked_admin,
    chosen_sources,
)
from walsender_bridge.config import SourceSection, load_config
from walsender_bridge.output import Output


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("init")(init)
    app.command("detach")(detach)


def init(
    config: ConfigPath = DEFAULT_CONFIG,
    source: OneSource = None,
    admin: Admin = None,
    as_json: AsJson = False,
) -> None:
    """Make what the sources need on their servers: publication, slot, flush table; with --admin the role."""
    from walsender_bridge.attach import init as attaching

    settings = load_config(config)
    admin = checked_admin(admin)
    rows: list[dict[str, str]] = []
    for section in chosen_sources(settings, source):
        made = attaching.init(capture_source(section), admin)
        rows += [{"source": section.name, "made": str(each)} for each in made]
    _say(Output(as_json=as_json), "made", rows)


def detach(
    config: ConfigPath = DEFAULT_CONFIG,
    source: OneSource = None,
    admin: Admin = None,
    as_json: AsJson = False,
) -> None:
    """Take back what init or capture made on the servers. The log and the lake stay where they are."""
    from walsender_bridge.attach import detach as leaving
    from walsender_bridge.lifetime import refuse_while_up

    settings = load_config(config)
    admin = checked_admin(admin)
    refuse_while_up(settings.run_dir)
    rows: list[dict[str, str]] = []
    # The other way round than init: a role that several databases share was made with the first.
    for section in reversed(chosen_sources(settings, source)):
        taken = leaving.detach(capture_source(section), admin)
        rows += [{"source": section.name, "taken_back": str(each)} for each in taken]
    _say(Output(as_json=as_json), "taken_back", rows)


def capture_source(section: SourceSection) -> Any:
    """The configured source as capture knows it."""
    from walsender_bridge.capture.source import Source

    return Source(
        section.name, section.dsn, section.slot_name, section.publication_name, section.tables
    )


def _say(output: Output, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows or output.as_json:
        output.rows(name, rows)
    else:
        output.note("nothing to do: it is all as it should be")
