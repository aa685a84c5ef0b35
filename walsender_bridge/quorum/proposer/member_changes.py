"""A change of the membership that an operator requests: a file that the running proposer polls.

The file names the requested members and *the generation* of the quorum's membership that they replace. So it is a
compare-and-swap: it is carried out from that generation only, and once, even if proposers die on the way; a joint
membership is completed by the next proposer from what the safekeepers hold. A leftover file, or one found on another
machine, changes nothing: its generation has passed.

    WAITING ──joining ones connected─▶ CHANGING (joint, then on disk) ──▶ DONE
        ├── another change came first ──▶ SUPERSEDED
        └── an hour without a beginning ──▶ EXPIRED

A forgotten request is not carried out when the safekeeper that was to join is started weeks later. The hour is measured
by the system's clock: if that leaps, a request may expire early, and has to be repeated.

The change is done when a majority of the new members has it on disk (`membership.py`): until then no member may be shut
down.

It begins when every joining safekeeper, and a majority of the new membership, is connected: commits then wait only as
long as the full resync of the new ones takes, from the last segments that may still be needed.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from walsender_bridge.errors import CorruptError, UsageError
from walsender_bridge.quorum.proposer.effects import MembersWanted
from walsender_bridge.quorum.proposer.membership import Membership
from walsender_bridge.quorum.proposer.peer import SafekeeperPeer
from walsender_bridge.quorum.proposer.replication import Streaming
from walsender_bridge.quorum.protocol.configuration import majority
from walsender_bridge.runtime import checksummed_json, json_model

Address = tuple[str, int]
#: How long a change may wait before it begins.
LASTS_SECONDS = 3600.0


class ChangeState(StrEnum):
    """See the module. NONE: there is no request."""

    NONE = "none"
    WAITING = "waiting"
    CHANGING = "changing"
    DONE = "done"
    SUPERSEDED = "superseded"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class _StoredRequest:
    """The file: identities in hexadecimal, addresses as `host:port`."""

    generation: int
    members: tuple[str, ...]
    addresses: tuple[str, ...]
    asked_at: float
    quorum: str


@dataclass(frozen=True, slots=True)
class MemberRequest:
    """`members`, identities, replace the membership of `generation`; `addresses`: where members are found.

    `asked_at`: seconds since 1970; also distinguishes requests. `quorum`: the id of the membership's quorum; 0: unknown.
    """

    generation: int
    members: frozenset[int]
    addresses: tuple[Address, ...]
    asked_at: float
    quorum: int = 0

    def state(self, membership: Membership, now: float) -> ChangeState:
        """Its state, as seen from the membership in force."""
        configuration = membership.configuration
        if self.quorum not in {0, membership.quorum}:
            return ChangeState.SUPERSEDED  # generations are counted in each quorum
        if configuration.new_members is not None:
            mine = configuration.new_members == self.members
            return ChangeState.CHANGING if mine else ChangeState.SUPERSEDED
        if configuration.members == self.members:
            return ChangeState.DONE if membership.settled else ChangeState.CHANGING
        if configuration.generation == self.generation:
            expired = abs(now - self.asked_at) > LASTS_SECONDS
            return ChangeState.EXPIRED if expired else ChangeState.WAITING
        return ChangeState.SUPERSEDED

    def obstacle(self, members: frozenset[int], peers: Iterable[SafekeeperPeer]) -> str:
        """The reason why it cannot begin from `members` now; empty if it can."""
        here = {peer.identity for peer in peers if peer.greeting is not None}
        missing = sorted(self.members - members - here)
        if missing:
            return f"safekeeper {missing[0]:032x}, which is to join, is not connected"
        if len(here & self.members) < majority(self.members):
            return "less than a majority of the new members is connected, so commits would wait"
        return ""

    def save(self, file: Path) -> None:
        """Write the file, durably. Raises `OSError`."""
        stored = _StoredRequest(
            generation=self.generation,
            members=tuple(sorted(f"{member:032x}" for member in self.members)),
            addresses=tuple(f"{host}:{port}" for host, port in self.addresses),
            asked_at=self.asked_at,
            quorum=f"{self.quorum:032x}",
        )
        checksummed_json.save(file, json_model.plain(stored))

    @classmethod
    def load(cls, file: Path) -> "MemberRequest | None":
        """The file's request; None if there is no file. Raises `CorruptError`."""
        try:
            stored = json_model.from_plain(_StoredRequest, checksummed_json.load(file))
            return cls(
                stored.generation,
                frozenset(int(member, 16) for member in stored.members),
                tuple(parse_address(each) for each in stored.addresses),
                stored.asked_at,
                int(stored.quorum, 16),
            )
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, UsageError) as error:
            raise CorruptError(
                f"invalid membership request: {error}",
                where=str(file),
                repair="remove the file, and request the change again",
            ) from error


def parse_address(text: str) -> Address:
    """`host:port`, where an IPv6 address has brackets. Raises `UsageError`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"invalid safekeeper address {text!r}", repair="write host:port")
    return host.strip("[]"), int(port)


class MemberChanges:
    """The file as the proposer polls it. `why`: what the change waits for. `clock`: seconds since 1970."""

    def __init__(self, file: Path | None, clock: Callable[[], float] = time.time) -> None:
        self._file = file
        self._clock = clock
        self._seen: tuple[int, int] | None = None
        self.request: MemberRequest | None = None
        self.why = ""

    def poll(self) -> tuple[Address, ...]:
        """Read the file if it has changed; returns its addresses."""
        if self._file is None:
            return ()
        try:
            found = self._file.stat()
        except OSError:
            return ()
        if self._seen != (found.st_ino, found.st_mtime_ns):
            self._seen = found.st_ino, found.st_mtime_ns
            try:
                self.request, self.why = MemberRequest.load(self._file), ""
            except CorruptError as error:
                self.request, self.why = None, error.what
        return self.request.addresses if self.request else ()

    def state(self, membership: Membership) -> ChangeState:
        """State of the last requested change."""
        return self.request.state(membership, self._clock()) if self.request else ChangeState.NONE

    def next(self, membership: Membership, streaming: Streaming | None) -> MembersWanted | None:
        """The event that begins the change, once it can begin."""
        request = self.request
        state = self.state(membership)
        if request is None or state != ChangeState.WAITING:
            expired = "the change could not begin within an hour, and has expired"
            if request is not None:
                self.why = expired if state == ChangeState.EXPIRED else ""
            return None
        if streaming is None or not streaming.established or not membership.settled:
            self.why = "no quorum follows this proposer yet"
            return None
        everyone = membership.configuration.everyone
        self.why = request.obstacle(everyone, streaming.peers.values())
        return None if self.why else MembersWanted(request.members)
