"""`tuskline init` and `tuskline detach`."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

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
    need_here,
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
    record_ddl: Annotated[
        bool,
        typer.Option(
            "--record-ddl",
            help="Create an event trigger that records changes of columns, so that the lake follows most of them without a copy.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create publication, slot and own schema on the servers.

    The schema tuskline has the flush table and the functions of FLUSH. With --admin, create the role as well. Run it again to
    bring the publication in line with `tables`. With [safekeepers], also create what the quorum needs, and make commits wait
    for the quorum if the proposer is attached and no other standby is synchronous. With [gate] candidates and --admin, let the role see the walsenders of their slots.
    """
    from walsender_bridge.provisioning import init as attaching
    from walsender_bridge.provisioning import schema_changes
    from walsender_bridge.provisioning.default_privileges import offered
    from walsender_bridge.provisioning.quorum import attach_quorum
    from walsender_bridge.provisioning.stats_grant import attach_gate

    settings = load_config(config)
    need_here(settings, "bridge")
    admin = checked_admin(admin)
    output = Output(as_json=as_json)
    rows: list[dict[str, str]] = []
    for section in chosen_sources(settings, source):
        known = known_of(settings, section)
        created = attaching.init(capture_source(section), admin, known and known.log)
        if record_ddl:
            created += schema_changes.record_ddl(capture_source(section), admin)
        removed = attaching.withdraw(capture_source(section), admin)
        for statement in offered(capture_source(section), admin):
            output.note(
                f"{section.name}: to let the role copy tables that are created later: {statement}"
            )
        if settings.gate_of(section).names:
            created += attach_gate(capture_source(section), admin)
        if section is settings.quorum_source:
            wanted = needed_quorum(settings)
            created += attach_quorum(wanted, admin)
            output.note(waits(wanted, admin))
        rows += [{"source": section.name, "created": str(each)} for each in created]
        without = f"publication {section.publication_name} without table"
        rows += [{"source": section.name, "created": f"{without} {name}"} for name in removed]
    _report(output, "created", rows)


def detach(
    config: ConfigPath = DEFAULT_CONFIG,
    source: OneSource = None,
    admin: Admin = None,
    as_json: AsJson = False,
) -> None:
    """Remove what init or capture created on the servers. The log and the lake stay as they are."""
    from walsender_bridge.provisioning import detach as leaving
    from walsender_bridge.provisioning.quorum import detach_quorum
    from walsender_bridge.runtime.pid_file import refuse_while_running

    settings = load_config(config)
    need_here(settings, "bridge")
    admin = checked_admin(admin)
    refuse_while_running(settings.run_dir)
    rows: list[dict[str, str]] = []
    left: list[str] = []
    # In the reverse order of init: a role that several databases share was created with the first.
    for section in reversed(chosen_sources(settings, source)):
        # Commits have to return first, since no proposer acknowledges them any more. The server's record decides, not the
        # configuration, whose safekeepers may have been removed meanwhile.
        removed = detach_quorum(quorum_of(settings, section), admin)
        removed += leaving.detach(capture_source(section), admin)
        rows += [{"source": section.name, "removed": str(each)} for each in removed]
        left += leaving.left_behind(capture_source(section), admin)
    output = Output(as_json=as_json)
    if rows or as_json or not left:
        _report(output, "removed", rows)
    for each in left:
        output.note(each)


def _report(output: Output, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows or output.as_json:
        output.rows(name, rows)
    else:
        output.note("nothing to do")
