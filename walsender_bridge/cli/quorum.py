"""`tuskline quorum`: whether commits wait for the safekeepers. docs/quorum-lost.md says when to do what."""

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
    help="Whether commits wait for the safekeepers: see docs/quorum-lost.md.", no_args_is_help=True
)

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask the first question.")]
Lossy = Annotated[
    bool, typer.Option("--yes-i-may-lose-data", help="Do not ask the second question.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.add_typer(quorum_app, name="quorum")


@quorum_app.command()
def show(config: ConfigPath = DEFAULT_CONFIG, admin: Admin = None, as_json: AsJson = False) -> None:
    """What commits wait for on the server, how many wait now, and a release that stands."""
    settings = load_config(config)
    from walsender_bridge.provisioning import quorum as server

    wanted = needed_quorum(settings)
    with server.session(wanted, checked_admin(admin)) as connection:
        Output(as_json=as_json).record(_shown(settings, server.facts(connection, wanted)))


@quorum_app.command()
def require(
    config: ConfigPath = DEFAULT_CONFIG,
    admin: Admin = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds in which a quorum has to answer; 0: do not ask for one.")
    ] = 30.0,
    beside: Annotated[
        bool,
        typer.Option(
            "--beside-standbys",
            help="Accept other names in synchronous_standby_names: see docs/quorum-lost.md.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Have commits wait for the quorum (again), once it is seen to work. Ends a release."""
    settings = load_config(config)
    from walsender_bridge.provisioning import quorum as server
    from walsender_bridge.provisioning import release_record

    wanted = needed_quorum(settings)
    output = Output(as_json=as_json)
    known = _recorded(settings, output)
    with server.session(wanted, checked_admin(admin)) as connection:
        if release_record.standing(settings.log.data_dir) is not None:
            # Only a superuser sees whether the release would come back with the next reload.
            server.may_set(connection, wanted)
        changed = server.require_quorum(connection, wanted, timeout=timeout, beside=beside)
        if known.formed:
            server.record_id(connection, wanted, known.quorum)
        if release_record.standing(settings.log.data_dir) is not None:
            decision = server.decision(connection, wanted, "require")
            release_record.write(settings.log.data_dir, decision)
        found = _shown(settings, server.facts(connection, wanted))
    output.record({"changed": changed, **found})


@quorum_app.command()
def release(
    config: ConfigPath = DEFAULT_CONFIG,
    admin: Admin = None,
    yes: Yes = False,
    lossy: Lossy = False,
    as_json: AsJson = False,
) -> None:
    """Have commits go on without the quorum, also those that hang now. Recorded until `quorum require`."""
    settings = load_config(config)
    from walsender_bridge.provisioning import quorum as server
    from walsender_bridge.provisioning import release_record

    wanted = needed_quorum(settings)
    output = Output(as_json=as_json)
    _somebody_is_asked(yes and lossy)
    with server.session(wanted, checked_admin(admin)) as connection:
        server.may_set(connection, wanted)
        before = server.decision(connection, wanted, "release")
        output.note(
            f"{wanted.where}: {before.waiting} commits wait. The WAL ends at {before.lsn}; a quorum has it up to "
            f"{before.quorum_lsn or 'an unknown LSN'}."
        )
        if not yes:
            typer.confirm("Have commits return without a quorum from now on?", abort=True, err=True)
        if not lossy:
            typer.confirm(
                f"If the disk of {wanted.where} is lost before `tuskline quorum require`, these commits are lost "
                "too. Really?",
                abort=True,
                err=True,
            )
        # First what is to be done, durably; then it is done.
        written = release_record.write(settings.log.data_dir, before)
        changed = server.release_quorum(connection, wanted)
        found = _shown(settings, server.facts(connection, wanted))
    output.record({"changed": changed, "recorded": written.told(), **found})


@quorum_app.command()
def forget(
    config: ConfigPath = DEFAULT_CONFIG,
    admin: Admin = None,
    yes: Yes = False,
    lossy: Lossy = False,
    as_json: AsJson = False,
) -> None:
    """Give up a quorum whose safekeepers are lost for good: the next `up` forms a new one. Recorded."""
    settings = load_config(config)
    from walsender_bridge.provisioning import quorum as server
    from walsender_bridge.provisioning import release_record
    from walsender_bridge.runtime.pid_file import refuse_while_running

    wanted = needed_quorum(settings)
    _somebody_is_asked(yes and lossy)
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
        release_record.write(settings.log.data_dir, decision)
    settings.quorum_id_file.unlink(missing_ok=True)
    output.record({"forgotten": f"{quorum:032x}" if quorum else None})


def _somebody_is_asked(said: bool) -> None:
    """Raises `UsageError` where there is nobody, and a script has not said so."""
    if not said and not sys.stdin.isatty():
        raise UsageError(
            "it needs to be confirmed, and there is no terminal to ask on",
            repair="read docs/quorum-lost.md; scripts say --yes --yes-i-may-lose-data",
        )


def _recorded(settings: "Config", output: Output) -> "KnownQuorumId":
    """The quorum's id as the bridge's file has it. One that cannot be read, now or ever, keeps nobody from deciding."""
    from walsender_bridge.quorum.proposer.quorum_id import KnownQuorumId
    from walsender_bridge.quorum.proposer.quorum_id_record import load_file

    try:
        return load_file(settings.quorum_id_file)
    except (CorruptError, UnavailableError) as error:
        output.note(f"the quorum's id is not taken from {error.where}: {error.what}")
        return KnownQuorumId()


def _shown(settings: "Config", found: dict[str, Any]) -> dict[str, Any]:
    from walsender_bridge.postgres.protocol.lsn import format_lsn
    from walsender_bridge.provisioning import release_record
    from walsender_bridge.provisioning.quorum import will_change

    released = release_record.standing(settings.log.data_dir)
    name = settings.safekeepers.application_name
    return {
        "synchronous_standby_names": found["names"],
        **({"after_reload": found["names_after_reload"]} if will_change(found) else {}),
        "proposers": found["senders"],
        "application_name": name,
        "waiting_commits": found["waiting"],
        "wal_lsn": None if found["flush_lsn"] is None else format_lsn(found["flush_lsn"]),
        # What this role may not see is not told as nothing.
        "sees_who_waits": found["may_see"],
        "quorum_lsn": None if found["quorum_lsn"] is None else format_lsn(found["quorum_lsn"]),
        "released": None if released is None else released.told(),
    }
