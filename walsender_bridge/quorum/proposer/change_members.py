"""Adding, removing and replacing safekeepers: an operator's request to the running proposer.

A safekeeper is named by its identity, a prefix of it, or its address. The identity is drawn with the data directory, so
a safekeeper that lost its disk answers at the same address with another identity, as a non-member: replacing an address
by itself puts the new identity in the place of the missing member.

Every operation is idempotent: a change that is complete or under way is recognized and not requested twice.

Invariant: `wait` returns only when the membership is settled (`membership.py`): then removed members may be shut down.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from walsender_bridge.errors import DeadlineError, UnavailableError, UsageError
from walsender_bridge.quorum.proposer.handshake import greet
from walsender_bridge.quorum.proposer.identities import has_forgotten
from walsender_bridge.quorum.proposer.member_changes import (
    ChangeState,
    MemberRequest,
    parse_address,
)
from walsender_bridge.quorum.proposer.status_record import ChangeRecord, SessionStatus
from walsender_bridge.quorum.protocol.messages import ServerInfo
from walsender_bridge.runtime import status_file
from walsender_bridge.runtime.tls_files import TlsFiles

#: The fewest digits of an identity that name a safekeeper.
_FEWEST_DIGITS = 4
#: Seconds between two polls of the status, and its age from which on the proposer counts as stopped.
_POLL_SECONDS = 0.1
#: Seconds within which a newly started proposer knows all safekeepers that answer.
_HEARD_SECONDS = 5.0
_STALE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ProposerFiles:
    """Files of the running proposer: its status, the requested members, and its certificate's."""

    status: Path
    members: Path
    tls: TlsFiles | None = None

    def read(self) -> SessionStatus:
        """Its status. Raises `UnavailableError` when it does not run, or has no quorum yet."""
        status = status_file.read(self.status, SessionStatus)
        if status is None or time.time() - status.updated_at > _STALE_SECONDS:
            raise UnavailableError(
                "the proposer is not running, or has not learned the membership yet",
                where=str(self.status),
                repair="start it, and a majority of the safekeepers",
            )
        return status


def change(
    files: ProposerFiles, *, add: Sequence[str] = (), remove: Sequence[str] = ()
) -> MemberRequest:
    """Request that members be added and removed. `add`: addresses; `remove`: see the module.

    Returns the request; `wait` waits for it. Raises `UsageError`, `UnavailableError`.
    """
    status, leaving = _leaving(files, remove)
    membership = status.membership
    members = _identities(membership.members)
    quorum = int(membership.quorum, 16)
    joining = {
        address: _identity_at(address, _server(status), quorum, files.tls) for address in add
    }
    _refuse_distrusted(joining, _identities(membership.distrusted))
    wanted = (members - leaving) | frozenset(joining.values())
    if not wanted:
        raise UsageError(
            "a quorum needs members", repair="add a safekeeper before removing the last one"
        )
    addresses = _addresses(status, members) | set(add)
    request = MemberRequest(
        membership.generation,
        wanted,
        tuple(parse_address(each) for each in sorted(addresses)),
        time.time(),
        quorum,
    )
    under_way = membership.new_members
    if under_way is not None:
        if _identities(under_way) not in (wanted, wanted - leaving):
            raise UsageError(
                "the membership is changing already", repair="wait until that change is complete"
            )
        return replace(request, members=_identities(under_way))
    if wanted != members:
        request.save(files.members)
    return request


def wait(files: ProposerFiles, request: MemberRequest, timeout: float) -> SessionStatus:
    """The proposer's status once the change is complete. Raises `DeadlineError`, and `UsageError` if another came first."""
    deadline = time.monotonic() + timeout
    why = "the proposer is not running"
    while time.monotonic() < deadline:
        try:
            status = files.read()
        except UnavailableError:
            time.sleep(_POLL_SECONDS)
            continue
        membership = status.membership
        if (
            _identities(membership.members) == request.members
            and membership.new_members is None
            and membership.settled
        ):
            return status
        # The status may still be about the previous request.
        if status.change.asked_at == request.asked_at:
            _refuse_unless_under_way(status.change, str(files.status))
        why = status.change.why or "a majority of the new members has not persisted it yet"
        time.sleep(_POLL_SECONDS)
    raise DeadlineError(
        f"the membership has not changed yet: {why}",
        where=str(files.status),
        repair="the change proceeds by itself if it can begin within an hour; repeat the command to wait longer",
    )


def _refuse_distrusted(joining: Mapping[str, int], distrusted: frozenset[int]) -> None:
    """A distrusted safekeeper joins again: its data directory was not emptied, so replacing it by itself changes nothing."""
    for address, identity in joining.items():
        if identity in distrusted:
            raise UsageError(has_forgotten(identity), where=address, repair="and start it again")


def _refuse_unless_under_way(change: ChangeRecord, where: str) -> None:
    if change.state == ChangeState.EXPIRED:
        raise UsageError(
            f"the membership was not changed: {change.why}",
            where=where,
            repair="start the safekeepers that are to join, and repeat the command",
        )
    if change.state == ChangeState.SUPERSEDED:
        raise UsageError(
            "another change of the membership came first",
            where=where,
            repair="check the members, and repeat the command",
        )


def _identities(texts: Sequence[str]) -> frozenset[int]:
    return frozenset(int(text, 16) for text in texts)


def _server(status: SessionStatus) -> ServerInfo:
    server = status.server
    return ServerInfo(server.system_id, server.major, server.segment_size)


def _identity_at(address: str, server: ServerInfo, quorum: int, tls: TlsFiles | None) -> int:
    host, port = parse_address(address)
    greeting = greet(host, port, server, tls)
    if greeting is None:
        raise UnavailableError(
            "no safekeeper for this server answers there",
            where=address,
            repair="start it with an empty data directory, or check which server's WAL it holds",
        )
    if greeting.configuration.is_foreign(quorum):
        raise UsageError(
            f"the safekeeper there belongs to quorum {greeting.configuration.quorum:032x}, not to {quorum:032x}",
            where=address,
            repair="give it an empty data directory, or name another address",
        )
    return greeting.safekeeper


def _addresses(status: SessionStatus, members: frozenset[int]) -> set[str]:
    """The members' addresses, for the next proposer. A member that was never heard of may be at any silent address."""
    missing = members - _heard(status)
    return {
        each.address
        for each in status.safekeepers
        if each.member or (missing and not each.safekeeper)
    }


def _heard(status: SessionStatus) -> frozenset[int]:
    return _identities([each.safekeeper for each in status.safekeepers if each.safekeeper])


def _leaving(files: ProposerFiles, names: Sequence[str]) -> tuple[SessionStatus, frozenset[int]]:
    """The proposer's status, and the members to remove; waits for members that are just starting."""
    deadline = time.monotonic() + _HEARD_SECONDS
    while True:
        status = files.read()
        members = _identities(status.membership.members)
        try:
            meant = {_member(name, status, members, files.tls) for name in names}
        except UnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return status, frozenset(each for each in meant if each is not None)


def _member(
    name: str, status: SessionStatus, members: frozenset[int], tls: TlsFiles | None
) -> int | None:
    """The member of this name; None: it has already left."""
    found = [each for each in members if f"{each:032x}".startswith(name.lower())]
    if len(name) >= _FEWEST_DIGITS and len(found) == 1:
        return found[0]
    if len(name) == len(f"{0:032x}") and not found:
        return None
    at_address = [each for each in status.safekeepers if each.address == name]
    for each in at_address:
        if each.member and each.safekeeper:
            return int(each.safekeeper, 16)
    known = bool(at_address)
    # A newly started proposer has not heard of all members.
    there = greet(*parse_address(name), _server(status), tls) if known else None
    if there is not None and there.safekeeper in members:
        return there.safekeeper
    missing = members - _heard(status)
    if known and len(missing) == 1:
        return next(iter(missing))
    if known and not missing:
        return None
    repair = "name one of " + ", ".join(sorted(f"{each:032x}" for each in members))
    if known and there is None:
        raise UnavailableError(
            f"the safekeeper does not answer, and may be any of {len(missing)} members that have not been heard of",
            where=name,
            repair=repair,
        )
    raise UsageError(f"{name!r} matches no member, or several", repair=repair)
