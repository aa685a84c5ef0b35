"""`tuskline quorum`: whether commits wait for the safekeepers. docs/quorum-lost.md describes when to use which command."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from walsender_bridge.cli.options import (
    DEFAULT_CONFIG,
    Admin,
    AsJson,
    ConfigPath,
    checked_admin,
    load_config,
)
from walsender_bridge.errors import CorruptError, UnavailableError, UsageError
from walsender_bridge.provisioning.configured import needed_quorum
from walsender_bridge.runtime.output import Output

if TYPE_CHECKING:
    from walsender_bridge.config import Config
    from walsender_bridge.quorum.proposer.quorum_id import KnownQuorumId

quorum_app = typer.Typer(
    help="Show or set whether commits wait for the quorum. See docs/quorum-lost.md.",
    no_args_is_help=True,
)

Yes = Annotated[bool, typer.Option("--yes", help="Answer the first question with yes.")]
Lossy = Annotated[
    bool, typer.Option("--yes-i-may-lose-data", help="Answer the second question with yes.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(quorum_app, name="quorum")


@quorum_app.command()
def show(config: ConfigPath = DEFAULT_CONFIG, admin: Admin = None, as_json: AsJson = False) -> None:
    """Show what commits wait for, and how many wait now. Also show a release that is in effect."""
    settings = load_config(config)
    from walsender_bridge.provisioning import quorum as server

    wanted = needed_quorum(settings)
    with server.session(wanted, checked_admin(admin)) as connection:
        Output(as_json=as_json).record(
            _shown(settings, server.facts_and_pending(connection, wanted))
        )


@quorum_app.command()
def require(
    config: ConfigPath = DEFAULT_CONFIG,
    admin: Admin = None,
    timeout: Annotated[
        float,
        typer.Option(
            help="Seconds to wait for an answer of the quorum; 0: set it without an answer."
        ),
    ] = 30.0,
    beside: Annotated[
        bool,
        typer.Option(
            "--beside-standbys",
            help="Keep other names in synchronous_standby_names: see docs/quorum-lost.md.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make commits wait for the quorum, once it has answered. Ends a release."""
    settings = load_config(config)
    from walsender_bridge.provisioning import quorum as server
    from walsender_bridge.provisioning import release_record

    wanted = needed_quorum(settings)
    output = Output(as_json=as_json)
    known = _recorded(settings, output)
    with server.session(wanted, checked_admin(admin)) as connection:
        if release_record.in_force(settings.data_dir) is not None:
            # Only a superuser sees whether the release would come back with the next reload.
            server.may_set(connection, wanted)
        changed = server.require_quorum(connection, wanted, timeout=timeout, beside=beside)
        if known.formed:
            server.record_id(connection, wanted, known.quorum)
        if release_record.in_force(settings.data_dir) is not None:
            decision = server.decision(connection, wanted, "require")
            release_record.write(settings.data_dir, decision)
        found = _shown(settings, server.facts_and_pending(connection, wanted))
    output.record({"changed": changed, **found})


@quorum_app.command()
def release(
    config: ConfigPath = DEFAULT_CONFIG,
    admin: Admin = None,
    yes: Yes = False,
    lossy: Lossy = False,
    as_json: AsJson = False,
) -> None:
    """Let commits return without the quorum. This includes commits that hang now, and is recorded until `quorum require`."""
    settings = load_config(config)
    from walsender_bridge.provisioning import quorum as server
    from walsender_bridge.provisioning import release_record

    wanted = needed_quorum(settings)
    output = Output(as_json=as_json)
    _require_confirmation(confirmed=yes and lossy)
    with server.session(wanted, checked_admin(admin)) as connection:
        server.may_set(connection, wanted)
        before = server.decision(connection, wanted, "release")
        output.note(
            f"{wanted.where}: {before.waiting} commits wait. The WAL ends at {before.lsn}; a quorum has it up to "
            f"{before.quorum_lsn or 'an unknown LSN'}."
        )
        if not yes:
            typer.confirm("Let commits return without a quorum from now on?", abort=True, err=True)
        if not lossy:
            typer.confirm(
                f"If the disk of {wanted.where} is lost before `tuskline quorum require`, these commits are lost "
                "too. Really?",
                abort=True,
                err=True,
            )
        # The decision is durable before it is carried out.
        written = release_record.write(settings.data_dir, before)
        changed = server.release_quorum(connection, wanted)
        found = _shown(settings, server.facts_and_pending(connection, wanted))
    output.record({"changed": changed, "recorded": written.summary(), **found})


@quorum_app.command()
def forget(
    config: ConfigPath = DEFAULT_CONFIG,
    admin: Admin = None,
    yes: Yes = False,
    lossy: Lossy = False,
    as_json: AsJson = False,
) -> None:
    """Give up a quorum whose safekeepers are lost for good. The next `up` forms a new one. The decision is recorded."""
    settings = load_config(config)
    from walsender_bridge.provisioning import quorum as server
    from walsender_bridge.provisioning import release_record
    from walsender_bridge.runtime.pid_file import refuse_while_running

    wanted = needed_quorum(settings)
    _require_confirmation(confirmed=yes and lossy)
    refuse_while_running(settings.run_dir)
    output = Output(as_json=as_json)
    quorum = _recorded(settings, output).quorum
    if not yes:
        typer.confirm(
            "Are the safekeepers' data directories gone for good, on all machines?",
            abort=True,
            err=True,
        )
    if not lossy:
        typer.confirm(
            f"Commits that only they have are lost if {wanted.where} does not have them. Is it the server whose"
            " commits they held, and was not restored from a backup?",
            abort=True,
            err=True,
        )
    with server.session(wanted, checked_admin(admin)) as connection:
        decision = server.decision(connection, wanted, "forget")
        server.forget_id(connection, wanted)
        release_record.write(settings.data_dir, decision)
    settings.quorum_id_file.unlink(missing_ok=True)
    output.record({"forgotten": f"{quorum:032x}" if quorum else None})


def _require_confirmation(*, confirmed: bool) -> None:
    """Raises `UsageError` if the options do not confirm it and there is no terminal to ask on."""
    if not confirmed and not sys.stdin.isatty():
        raise UsageError(
            "the command needs a confirmation, and standard input is not a terminal",
            repair="read docs/quorum-lost.md; in scripts, use --yes --yes-i-may-lose-data",
        )


def _recorded(settings: "Config", output: Output) -> "KnownQuorumId":
    """The quorum's id from the bridge's file. A file that cannot be read does not prevent the operator's decision."""
    from walsender_bridge.quorum.proposer.quorum_id import KnownQuorumId
    from walsender_bridge.quorum.proposer.quorum_id_record import load_file

    try:
        return load_file(settings.quorum_id_file)
    except (CorruptError, UnavailableError) as error:
        output.note(f"could not read the quorum's id from {error.where}: {error.what}")
        return KnownQuorumId()


def _shown(settings: "Config", found: dict[str, Any]) -> dict[str, Any]:
    from walsender_bridge.postgres.protocol.lsn import format_lsn
    from walsender_bridge.provisioning import release_record
    from walsender_bridge.provisioning.quorum import will_change

    released = release_record.in_force(settings.data_dir)
    name = settings.safekeepers.application_name
    return {
        "synchronous_standby_names": found["names"],
        **({"after_reload": found["names_after_reload"]} if will_change(found) else {}),
        "proposers": found["senders"],
        "application_name": name,
        "waiting_commits": found["waiting"],
        "wal_lsn": None if found["flush_lsn"] is None else format_lsn(found["flush_lsn"]),
        # Whether the role may see waiting commits: otherwise their number is unknown, not 0.
        "sees_waiting_commits": found["may_see"],
        "quorum_lsn": None if found["quorum_lsn"] is None else format_lsn(found["quorum_lsn"]),
        "released": None if released is None else released.summary(),
    }
