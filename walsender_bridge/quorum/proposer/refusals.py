"""What the safekeepers' refusals rule out: one safekeeper, or this proposer as a whole. Pure.

A single safekeeper cannot end a proposer that a quorum would follow: its address or its disk may be the wrong one. So
each of these reasons is counted, and until enough safekeepers have given it, it is that safekeeper's fault.

Safekeepers of another cluster or quorum rule a proposer out only if they are at most of the configured addresses, and
only while it has no quorum of its own: one that was named in a membership request by mistake, or that took the address
of a removed member, ends no proposer.
"""

from walsender_bridge.quorum.proposer.effects import STOPS, StopReason
from walsender_bridge.quorum.proposer.peer import SafekeeperPeer
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration


class Refusals:
    """See the module.

    `withheld`: safekeepers, by identity, that do not vote for this server's timeline: a failover has fenced it, or their log
    is on a newer one. `foreign`: addresses, by the peer's number, of safekeepers of another cluster or quorum.
    """

    __slots__ = ("foreign", "withheld")

    def __init__(self) -> None:
        self.withheld: frozenset[int] = frozenset()
        self.foreign: frozenset[int] = frozenset()

    def weigh(
        self,
        peer: SafekeeperPeer,
        reason: m.Refusal,
        configuration: Configuration,
        addresses: int,
        *,
        has_quorum: bool,
    ) -> StopReason | None:
        """The reason that rules this proposer out; None: it is this safekeeper's fault alone.

        `addresses`: the first so many are configured. `has_quorum`: whether a quorum is connected, or has elected it.
        """
        stop = STOPS.get(reason)
        if stop in {StopReason.FENCED, StopReason.OTHER_HISTORY}:
            self.withheld |= {peer.identity}
            left = configuration.trusted - self.withheld
            return None if configuration.has_quorum(left) else stop
        if stop in {StopReason.OTHER_SERVER, StopReason.OTHER_QUORUM}:
            # The address is wrong; if most are, it is this proposer that is wrong.
            self.foreign |= {peer.number}
            theirs = sum(number < addresses for number in self.foreign)
            return stop if theirs > addresses // 2 and not has_quorum else None
        return stop

    def greeted(self, peer: SafekeeperPeer) -> None:
        """A safekeeper of this server now answers at its address."""
        self.foreign -= {peer.number}

    def voted(self, peer: SafekeeperPeer) -> None:
        """It has voted after all: its reason to withhold the vote was undone."""
        self.withheld -= {peer.identity}
