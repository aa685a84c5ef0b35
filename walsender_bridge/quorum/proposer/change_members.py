"""Adding, removing and replacing safekeepers: what an operator asks, as a request to the proposer that runs.

A safekeeper is named by its identity, a beginning of it, or its address. The identity is drawn with the data
directory, so at the address of one that lost its disk another one answers, which is no member: replacing an address
by itself puts that one in the place of the member that is missing.

Everything here may be repeated: a change that is made, or under way, is found so and not asked for twice.

Invariant: `wait` returns only when the membership is settled (`membership.py`): then who left may be switched off.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from walsender_bridge.errors import DeadlineError, UnavailableError, UsageError
from walsender_bridge.quorum.proposer.handshake import greet
from walsender_bridge.quorum.proposer.identities import has_forgotten
from walsender_bridge.quorum.proposer.member_changes import (
    ChangeState,
    MemberRequest,
    parse_address,
)
from walsender_bridge.quorum.protocol.messages import ServerInfo
from walsender_bridge.runtime import status_file

#: Digits of an identity that name a safekeeper.
_FEWEST_DIGITS = 4
#: Seconds between two looks at the status, and its age from which on the proposer is taken to be gone.
_POLL_SECONDS = 0.1
#: Seconds in which a proposer that has just started hears of all safekeepers that answer.
_HEARD_SECONDS = 5.0
_STALE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ProposerFiles:
    """Of the proposer that runs: where it says how far it is, and where it is asked for members."""

    status: Path
    members: Path

    def read(self) -> dict[str, Any]:
        """What it says. Raises `UnavailableError` when it does not run, or has no quorum yet."""
        said = status_file.read(self.status)
        old = time.time() - said.get("updated_at", 0.0) > _STALE_SECONDS
        if old or "membership" not in said:
            raise UnavailableError(
                "the proposer does not run, or has not heard of a membership yet",
                where=str(self.status),
                repair="start it, and a majority of the safekeepers",
            )
        return said


def change(
    files: ProposerFiles, *, add: Sequence[str] = (), remove: Sequence[str] = ()
) -> MemberRequest:
    """Ask for these members more, and those fewer. `add`: addresses; `remove`: see the module.

    Returns what was asked; `wait` waits for it. Raises `UsageError`, `UnavailableError`.
    """
    said, leaving = _leaving(files, remove)
    membership = said["membership"]
    members = _identities(membership["members"])
    quorum = int(membership.get("quorum", "0"), 16)
    joining = {address: _identity_at(address, said["server"], quorum) for address in add}
    _refuse_distrusted(joining, _identities(membership.get("distrusted", ())))
    wanted = (members - leaving) | frozenset(joining.values())
    if not wanted:
        raise UsageError("a quorum needs members", repair="add one before the last one goes")
    addresses = _addresses(said, members) | set(add)
    request = MemberRequest(
        membership["generation"],
        wanted,
        tuple(parse_address(each) for each in sorted(addresses)),
        time.time(),
        quorum,
    )
    under_way = membership["new_members"]
    if under_way is not None:
        if _identities(under_way) not in (wanted, wanted - leaving):
            raise UsageError(
                "the membership is changing already", repair="wait until that change is complete"
            )
        return replace(request, members=_identities(under_way))
    if wanted != members:
        request.save(files.members)
    return request


def wait(files: ProposerFiles, request: MemberRequest, timeout: float) -> dict[str, Any]:
    """The proposer's status once the change is made. Raises `DeadlineError`, and `UsageError` if another came first."""
    deadline = time.monotonic() + timeout
    why = "the proposer does not run"
    while time.monotonic() < deadline:
        try:
            said = files.read()
        except UnavailableError:
            time.sleep(_POLL_SECONDS)
            continue
        if (
            _identities(said["membership"]["members"]) == request.members
            and said["membership"]["new_members"] is None
            and said["membership"]["settled"]
        ):
            return said
        # Of the request before this one it may speak still.
        if said["change"].get("asked_at") == request.asked_at:
            _refuse_unless_under_way(said["change"], str(files.status))
        why = said["change"]["why"] or "a majority of the new members has not written it down yet"
        time.sleep(_POLL_SECONDS)
    raise DeadlineError(
        f"the membership is not changed yet: {why}",
        where=str(files.status),
        repair="it goes on by itself if it can begin within an hour; ask again to wait longer",
    )


def _refuse_distrusted(joining: Mapping[str, int], distrusted: frozenset[int]) -> None:
    """It answers where its data directory should have been emptied; to put it in its own place changes nothing."""
    for address, identity in joining.items():
        if identity in distrusted:
            raise UsageError(has_forgotten(identity), where=address, repair="and start it again")


def _refuse_unless_under_way(change: dict[str, Any], where: str) -> None:
    if change["state"] == ChangeState.EXPIRED:
        raise UsageError(
            f"the membership was not changed: {change['why']}",
            where=where,
            repair="start the safekeepers that are to join, and ask again",
        )
    if change["state"] == ChangeState.SUPERSEDED:
        raise UsageError(
            "another change of the membership came first",
            where=where,
            repair="look at the members, and ask again",
        )


def _identities(texts: Sequence[str]) -> frozenset[int]:
    return frozenset(int(text, 16) for text in texts)


def _identity_at(address: str, server: dict[str, int], quorum: int) -> int:
    host, port = parse_address(address)
    greeting = greet(host, port, ServerInfo(**server))
    if greeting is None:
        raise UnavailableError(
            "no safekeeper for this server answers there",
            where=address,
            repair="start it with an empty data directory, or see whose WAL it holds",
        )
    if greeting.configuration.is_foreign(quorum):
        raise UsageError(
            f"the safekeeper there belongs to quorum {greeting.configuration.quorum:032x}, not to {quorum:032x}",
            where=address,
            repair="give it an empty data directory, or name another address",
        )
    return greeting.safekeeper


def _addresses(said: dict[str, Any], members: frozenset[int]) -> set[str]:
    """Where the members are: the next proposer finds them there. One not heard of can be at any that is silent."""
    missing = members - _heard(said)
    return {
        each["address"]
        for each in said["safekeepers"]
        if each["member"] or (missing and not each["safekeeper"])
    }


def _heard(said: dict[str, Any]) -> frozenset[int]:
    return _identities([each["safekeeper"] for each in said["safekeepers"] if each["safekeeper"]])


def _leaving(files: ProposerFiles, names: Sequence[str]) -> tuple[dict[str, Any], frozenset[int]]:
    """The proposer's status, and the members that are meant: those that are just starting are waited for."""
    deadline = time.monotonic() + _HEARD_SECONDS
    while True:
        said = files.read()
        members = _identities(said["membership"]["members"])
        try:
            meant = {_member(name, said, members) for name in names}
        except UnavailableError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return said, frozenset(each for each in meant if each is not None)


def _member(name: str, said: dict[str, Any], members: frozenset[int]) -> int | None:
    """The member that is meant; None: one that has left already."""
    found = [each for each in members if f"{each:032x}".startswith(name.lower())]
    if len(name) >= _FEWEST_DIGITS and len(found) == 1:
        return found[0]
    if len(name) == len(f"{0:032x}") and not found:
        return None
    for each in said["safekeepers"]:
        if each["address"] == name and each["member"]:
            return int(each["safekeeper"], 16)
    known = any(each["address"] == name for each in said["safekeepers"])
    # A proposer that has just started has not heard of all of them.
    there = greet(*parse_address(name), ServerInfo(**said["server"])) if known else None
    if there is not None and there.safekeeper in members:
        return there.safekeeper
    missing = members - _heard(said)
    if known and len(missing) == 1:
        return next(iter(missing))
    if known and not missing:
        return None
    repair = "name one of " + ", ".join(sorted(f"{each:032x}" for each in members))
    if known and there is None:
        raise UnavailableError(
            f"it does not answer, and {len(missing)} members have not been heard of: it may be any of them",
            where=name,
            repair=repair,
        )
    raise UsageError(f"{name!r} names none of the members, or several", repair=repair)
