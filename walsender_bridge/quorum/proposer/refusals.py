"""Whom the safekeepers' refusals rule out: one safekeeper from taking part, or this proposer as a whole. Pure.

A single safekeeper cannot end a proposer that a quorum would follow: its address or its disk may be the wrong one. So
each of these reasons is weighed, and until enough have given it, it is that safekeeper's fault.

Safekeepers of another cluster or quorum rule a proposer out only where most of the addresses are theirs that the
operator wrote down, and as long as no quorum of its own is there: one that was named in a request for members by mistake,
or that took the address of one that has left, ends nobody.
"""

from walsender_bridge.quorum.proposer.effects import STOPS, StopReason
from walsender_bridge.quorum.proposer.peer import SafekeeperPeer
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration


class Refusals:
    """See the module.

    `withheld`: who does not vote for this server's timeline, by identity: a failover has fenced it, or the log there went
    over to a newer one. `foreign`: addresses, by the peer's number, where a safekeeper of another
    cluster, or of another quorum, is.
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
        """What rules this proposer out; None: it is this safekeeper's fault alone.

        `addresses`: how many of them, the first, are the operator's. `has_quorum`: whether a quorum is there, or has
        elected it.
        """
        stop = STOPS.get(reason)
        if stop in {StopReason.FENCED, StopReason.OTHER_HISTORY}:
            self.withheld |= {peer.identity}
            left = configuration.trusted - self.withheld
            return None if configuration.has_quorum(left) else stop
        if stop in {StopReason.OTHER_SERVER, StopReason.OTHER_QUORUM}:
            # An address is wrong; if most are, it is this proposer that is in the wrong place.
            self.foreign |= {peer.number}
            theirs = sum(number < addresses for number in self.foreign)
            return stop if theirs > addresses // 2 and not has_quorum else None
        return stop

    def greeted(self, peer: SafekeeperPeer) -> None:
        """At its address is a safekeeper of this server now."""
        self.foreign -= {peer.number}

    def voted(self, peer: SafekeeperPeer) -> None:
        """It votes after all: what it withheld its vote for was taken back."""
        self.withheld -= {peer.identity}
