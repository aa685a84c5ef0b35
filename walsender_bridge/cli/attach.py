"""`tuskline init` and `tuskline detach`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    Admin,
    AsJson,
    ConfigPath,
    OneSource,
    checked_admin,
    chosen_sources,
    load_config,
)
from walsender_bridge.provisioning.configured import (
    capture_source,
    known_of,
    needed_quorum,
    quorum_of,
    waits,
)
from walsender_bridge.runtime.output import Output

if TYPE_CHECKING:
    pass


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
    """Make what the sources need on their servers: publication, slot, flush table; with --admin the role.

    Run again, it brings the publication up to `tables`. With [safekeepers] also what the quorum needs; commits wait for it once the proposer runs. With [gate] candidates and
    --admin the role may see what streams from their slots.
    """
    from walsender_bridge.provisioning import init as attaching
    from walsender_bridge.provisioning.default_privileges import offered
    from walsender_bridge.provisioning.quorum import attach_quorum
    from walsender_bridge.provisioning.stats_grant import attach_gate

    settings = load_config(config)
    admin = checked_admin(admin)
    output = Output(as_json=as_json)
    rows: list[dict[str, str]] = []
    for section in chosen_sources(settings, source):
        known = known_of(settings, section)
        made = attaching.init(capture_source(section), admin, known and known.log)
        gone = attaching.withdraw(capture_source(section), admin)
        for statement in offered(capture_source(section), admin):
            output.note(f"{section.name}: so that tables made later can be copied: {statement}")
        if settings.gate_of(section).names:
            made += attach_gate(capture_source(section), admin)
        if section is settings.quorum_source:
            wanted = needed_quorum(settings)
            made += attach_quorum(wanted, admin)
            output.note(waits(wanted, admin))
        rows += [{"source": section.name, "made": str(each)} for each in made]
        without = f"publication {section.publication_name} without table"
        rows += [{"source": section.name, "made": f"{without} {name}"} for name in gone]
    _say(output, "made", rows)


def detach(
    config: ConfigPath = DEFAULT_CONFIG,
    source: OneSource = None,
    admin: Admin = None,
    as_json: AsJson = False,
) -> None:
    """Take back what init or capture made on the servers. The log and the lake stay where they are."""
    from walsender_bridge.provisioning import detach as leaving
    from walsender_bridge.provisioning.quorum import detach_quorum
    from walsender_bridge.runtime.pid_file import refuse_while_running

    settings = load_config(config)
    admin = checked_admin(admin)
    refuse_while_running(settings.run_dir)
    rows: list[dict[str, str]] = []
    left: list[str] = []
    # The other way round than init: a role that several databases share was made with the first.
    for section in reversed(chosen_sources(settings, source)):
        # First of all commits have to return: nobody answers them any more. Its record is asked, not the
        # configuration: that may have lost its safekeepers meanwhile.
        taken = detach_quorum(quorum_of(settings, section), admin)
        taken += leaving.detach(capture_source(section), admin)
        rows += [{"source": section.name, "taken_back": str(each)} for each in taken]
        left += leaving.left_behind(capture_source(section), admin)
    output = Output(as_json=as_json)
    if rows or as_json or not left:
        _say(output, "taken_back", rows)
    for each in left:
        output.note(each)


def _say(output: Output, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows or output.as_json:
        output.rows(name, rows)
    else:
        output.note("nothing to do: it is all as it should be")
