"""`tuskline safekeeper add|remove|replace`: changes the quorum's membership while commits continue."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from walsender_bridge.cli.options import DEFAULT_CONFIG, AsJson, ConfigPath, need_here
from walsender_bridge.cli.safekeeper import configured, safekeeper_app
from walsender_bridge.runtime.output import Output

if TYPE_CHECKING:
    from walsender_bridge.observability.quorum_view import QuorumView
    from walsender_bridge.quorum.proposer.status_record import ReportedSafekeeper

New = Annotated[str, typer.Argument(help="host:port of a running safekeeper that is not a member.")]
Old = Annotated[
    str, typer.Argument(help="A member: its identity, a prefix of it, or its host:port.")
]
Timeout = Annotated[float, typer.Option(help="Seconds to wait for the change.", min=0)]


def register(_: typer.Typer) -> None:
    """Add the commands to the group `safekeeper`."""
    for command in (add, remove, replace):
        safekeeper_app.command()(command)


def add(
    new: New,
    config: ConfigPath = DEFAULT_CONFIG,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> None:
    """Add a safekeeper to the quorum."""
    _change(config, timeout, add=[new], as_json=as_json)


def remove(
    old: Old,
    config: ConfigPath = DEFAULT_CONFIG,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> None:
    """Remove a member from the quorum."""
    _change(config, timeout, remove=[old], as_json=as_json)


def replace(
    old: Old,
    new: New,
    config: ConfigPath = DEFAULT_CONFIG,
    timeout: Timeout = 60.0,
    as_json: AsJson = False,
) -> None:
    """Replace a member with another safekeeper. For a member that lost its disk, OLD and NEW are the same address."""
    _change(config, timeout, add=[new], remove=[old], as_json=as_json)


def _change(config: Any, timeout: float, *, as_json: bool, **wanted: list[str]) -> None:
    from walsender_bridge.observability import quorum_view
    from walsender_bridge.quorum.proposer.change_members import ProposerFiles, change, wait

    settings, output = configured(config), Output(as_json=as_json)
    need_here(settings, "bridge")
    files = ProposerFiles(settings.proposer_status, settings.members_request, settings.tls_files)
    before = quorum_view.observe(settings)
    assert before is not None
    outcome = wait(files, change(files, **wanted), timeout)
    members = [each for each in outcome.safekeepers if each.member]
    addresses = sorted(each.address for each in members)
    if set(addresses) != set(settings.safekeepers.proposed_to):
        output.note(f"set in {config}: [safekeepers] addresses = {addresses}")
    not_served = unserved_wal(members, before, wanted.get("add", []))
    for each in not_served:
        output.note(
            f"{each['address']} does not serve WAL from {each['from']} to "
            f"{each['to'] or 'its begin_lsn (see tuskline safekeeper status)'}, which members had before: it receives what "
            "keep_bytes and its readers' slots retain of it"
        )
    output.record(
        {
            "generation": outcome.membership.generation,
            "members": addresses,
            "not_served": not_served,
        }
    )


def unserved_wal(
    members: Sequence["ReportedSafekeeper"], before: "QuorumView", joined: Collection[str]
) -> list[dict[str, Any]]:
    """The WAL that earlier members had and members that joined lack. `to` is None if it is not known yet.

    `members`: the members as the proposer reports them now.
    """
    from walsender_bridge.postgres.protocol.lsn import parse_lsn

    begins = [
        each.begin_lsn for each in before.safekeepers if each.reported and each.reported.member
    ]
    oldest = min((lsn for lsn in begins if lsn and parse_lsn(lsn)), key=parse_lsn, default=None)
    if oldest is None:
        return []
    return [
        {"address": each.address, "from": oldest, "to": each.begin_lsn}
        for each in members
        if each.address in joined
        and (each.begin_lsn is None or parse_lsn(each.begin_lsn) > parse_lsn(oldest))
    ]
