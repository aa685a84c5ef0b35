"""Whether the primary's WAL below VCL equals the quorum's: which bytes are compared, and what the result means. Pure.

A server of the right system and lineage can still be a copy that has diverged, so before the proposer leads, the last
`compare_bytes` below VCL are compared with voters that have them. Until then the election has no effect on any log.

Invariant: whatever any voter holds of that range is compared. The most advanced voter may have done a full resync at VCL
itself, or a page header below, so that comparing with it proves nothing; another voter, even one whose log ends earlier,
has the same bytes up to the divergence point of the two logs. So the comparison descends from VCL, voter by voter.
"""

from collections.abc import Collection, Iterable
from enum import StrEnum

from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.quorum.proposer import election
from walsender_bridge.quorum.proposer.effects import CompareWal, Limits, Lineage, WalCompared
from walsender_bridge.quorum.proposer.peer import SafekeeperPeer
from walsender_bridge.quorum.protocol.history import divergence
from walsender_bridge.quorum.protocol.messages import ServerInfo, VoteReply


class ComparisonVerdict(StrEnum):
    """The meaning of an answer.

    STALE: it came from a connection that broke. AGAIN: retry at the next tick. OUTRANKED: VCL is higher by now. EQUAL: so
    far; `ask` returns the next range to compare, if any.
    """

    STALE = "stale"
    AGAIN = "again"
    OUTRANKED = "outranked"
    EQUAL = "equal"
    OTHER = "other"
    REMOVED = "removed"


class SameWal:
    """See the module. `wanted`: the range being compared.

    `below`: the logs were found equal down to this LSN. `last_segment`: whether the comparison stays within VCL's segment:
    a server may have removed the one before. `unread`: voters whose last comparison failed; another voter that has the same
    range is asked first.
    """

    __slots__ = ("below", "last_segment", "unread", "wanted")

    def __init__(self) -> None:
        self.wanted: CompareWal | None = None
        self.below: Lsn | None = None
        self.last_segment = False
        self.unread: frozenset[int] = frozenset()

    def forget(self) -> None:
        """VCL may have changed: forget the result so far; an answer under way is stale."""
        self.wanted = self.below = None

    def ask(
        self,
        best: VoteReply,
        vcl: Lsn,
        peers: Iterable[SafekeeperPeer],
        limits: Limits,
        server: ServerInfo,
    ) -> CompareWal | None:
        """The next range, the highest one, and the voter that has most of it; None: everything is equal."""
        below = vcl if self.below is None else self.below
        # A server sends one timeline at a time, and the lineage agrees up to the switch point.
        floor = max(vcl - limits.compare_bytes, timeline_start(best, vcl))
        if self.last_segment:
            floor = max(floor, (vcl - 1) - (vcl - 1) % server.segment_size)
        ranges = []
        for peer in peers:
            if peer.reply is not None:
                end = min(agrees_up_to(peer.reply, best, vcl), below)
                begin = max(peer.reply.begin_lsn, floor)
                could = peer.number not in self.unread
                ranges += [(end, could, -begin, -peer.number)] if begin < end else []
        if not ranges:
            return None
        end, _, begin, number = max(ranges)
        self.wanted = CompareWal(-number, -begin, end)
        return self.wanted

    def answered(
        self, compared: WalCompared, best: VoteReply | None, replies: Collection[VoteReply]
    ) -> ComparisonVerdict:
        """The verdict of an answer. REMOVED: and no later vote came from a more advanced log than `best`."""
        wanted = self.wanted
        if wanted is None or (wanted.peer, wanted.end_lsn) != (compared.peer, compared.end_lsn):
            return ComparisonVerdict.STALE
        self.wanted = None
        if compared.equal is not None:
            self.unread -= {wanted.peer}
            self.below = wanted.begin_lsn
            return ComparisonVerdict.EQUAL if compared.equal else ComparisonVerdict.OTHER
        if compared.removed and self.last_segment:
            return (
                ComparisonVerdict.OUTRANKED
                if election.outranked(best, replies)
                else ComparisonVerdict.REMOVED
            )
        if not compared.removed:
            self.unread |= {wanted.peer}
        self.last_segment = not self.last_segment
        return ComparisonVerdict.AGAIN


def agrees_up_to(reply: VoteReply, best: VoteReply, vcl: Lsn) -> Lsn:
    """The LSN up to which a voter has the best log's bytes."""
    if election.rank(reply) == election.rank(best):
        return vcl
    return divergence(reply.history, reply.flush_lsn, best.history, vcl) or 0


def may_lack(vcl: Lsn, lineage: Lineage, server: ServerInfo) -> bool:
    """Whether a server that was promoted may have removed the segment below VCL, and still have what voters lack.

    It had no slot of ours as a standby, and VCL starts a segment: its first checkpoint as a primary removes the one
    before. A failover has compared that segment before the promotion. On the quorum's own timeline the slot keeps it.
    """
    return vcl % server.segment_size == 0 and lineage.timeline_at(vcl - 1) != lineage.timeline


def timeline_start(best: VoteReply, vcl: Lsn) -> Lsn:
    """Start of the timeline of the best log's last byte; VCL for an empty log."""
    first = best.history.entries[0].start_lsn
    return best.history.timeline_start(vcl - 1) if first < vcl else vcl


def removed(vcl: Lsn) -> str:
    """Message for a server that lacks even the last segment below VCL."""
    return (
        f"the WAL of a majority of the safekeepers ends at {format_lsn(vcl)}, and this server has removed the segment "
        "before it, so it can neither compare its WAL with theirs nor send what they lack"
    )


def other(vcl: Lsn) -> str:
    """Message for a server whose WAL differs from the quorum's."""
    return f"this server's WAL below {format_lsn(vcl)} differs from the safekeepers' WAL"
