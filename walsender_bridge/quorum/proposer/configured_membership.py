"""Whether the membership in force is the one that its operator configured. Pure.

A membership is read from the safekeepers, and created from all that answer if there is none (`first_membership.py`).
So a proposer that was started by mistake for one safekeeper alone forms a quorum of one, and every later proposer
finds it. The operator's intention is what they wrote: the addresses of the configuration, or the last change that
they requested with `tuskline safekeeper add|remove|replace`.

Invariant: no proposer's process starts with a membership of fewer safekeepers than are configured, unless that was
requested; and any difference is reported for as long as it lasts.
"""

from collections.abc import Mapping, Sequence

from walsender_bridge.errors import ConfigError
from walsender_bridge.quorum.proposer.member_changes import Address, MemberRequest
from walsender_bridge.quorum.protocol.configuration import Configuration

_REPAIR = (
    "to continue with the present members, list only their addresses in [safekeepers] addresses, start, and"
    " add the others with `tuskline safekeeper add`"
)


def _count(number: int) -> str:
    return f"{number} safekeeper" if number == 1 else f"{number} safekeepers"


def refuse_smaller(
    configuration: Configuration, configured: Sequence[Address], request: MemberRequest | None
) -> None:
    """Raises `ConfigError` for a membership of fewer safekeepers than are configured, unless it was requested."""
    members = configuration.new_members or configuration.members
    if len(members) < len(configured) and not _asked_for(configuration, request):
        raise ConfigError(
            f"the quorum has {_count(len(members))}, but {len(configured)} are configured: COMMIT would return with"
            " fewer copies than that",
            where=", ".join(f"{host}:{port}" for host, port in configured),
            repair=_REPAIR,
        )


def difference(
    configuration: Configuration,
    configured: Sequence[Address],
    found: Mapping[Address, int],
    request: MemberRequest | None,
) -> str:
    """How the membership differs from the configuration; empty: it does not.

    `found`: the identity at each address, where it is known.
    """
    if not configuration or _asked_for(configuration, request):
        return ""
    members = configuration.new_members or configuration.members
    strangers = [
        f"{host}:{port}"
        for host, port in configured
        if found.get((host, port)) and found[host, port] not in configuration.everyone
    ]
    elsewhere = [
        f"{host}:{port}"
        for (host, port), identity in found.items()
        if identity in members and (host, port) not in configured
    ]
    differences = []
    if len(members) != len(configured):
        differences.append(
            f"the quorum has {_count(len(members))}, but {len(configured)} are configured"
        )
    if strangers:
        differences.append(f"configured, but not members: {', '.join(strangers)}")
    if elsewhere:
        differences.append(f"members, but not configured: {', '.join(elsewhere)}")
    return "; ".join(differences)


def _asked_for(configuration: Configuration, request: MemberRequest | None) -> bool:
    """Whether the membership is, or is becoming, the one requested last."""
    members = configuration.new_members or configuration.members
    return request is not None and request.members == members
