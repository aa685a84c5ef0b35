"""The leader state of an elected proposer: brings voters into its election epoch, counts their acknowledgements.

Each safekeeper is sent WAL from the divergence point of the two histories (rules 3, 6); it computes the same point
itself, or refuses. Only acknowledgements of this term count (rule 4). `replication.py` decides what is committed,
`membership.py` which majorities that needs.
"""

from collections.abc import Collection

from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition
from walsender_bridge.quorum.proposer import election, identities
from walsender_bridge.quorum.proposer.effects import (
    ClosePeer,
    Effect,
    Limits,
    MembersChanged,
    MembersSettled,
    PassFeedback,
    SendMessage,
)
from walsender_bridge.quorum.proposer.membership import Membership
from walsender_bridge.quorum.proposer.peer import PeerState, SafekeeperPeer
from walsender_bridge.quorum.proposer.replication import Streaming
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History, divergence
from walsender_bridge.quorum.protocol.hot_standby_feedback import oldest


class LeaderState:
    """See the module. `history` ends with this term's election epoch, which starts at `vcl`."""

    __slots__ = (
        "ancestors",
        "feedback",
        "history",
        "membership",
        "peers",
        "streaming",
        "term",
        "vcl",
    )

    def __init__(
        self,
        term: int,
        vcl: Lsn,
        history: History,
        peers: dict[int, SafekeeperPeer],
        membership: Membership,
        streaming: Streaming,
    ) -> None:
        self.term = term
        self.vcl = vcl
        self.history = history
        self.peers = peers
        self.membership = membership
        self.streaming = streaming
        self.feedback = m.HotStandbyFeedback()
        #: The timelines before the server's, and their switch points.
        self.ancestors: tuple[WalPosition, ...] = ()

    @classmethod
    def elected(
        cls,
        term: int,
        vcl: Lsn,
        history: History,
        peers: dict[int, SafekeeperPeer],
        membership: Membership,
        best: m.VoteReply,
        voters: Collection[m.VoteReply],
        segment_size: int,
        limits: Limits,
        primary_begin: Lsn | None,
    ) -> "LeaderState":
        """The leader state after an election by these votes; `best` is the most advanced of them."""
        commit = election.committed([best, *voters])
        restart = max((election.restart(reply, best, vcl) for reply in voters), default=0)
        streaming = Streaming(
            peers,
            membership.configuration,
            history,
            epoch_start=vcl,
            commit_lsn=commit,
            # Votes end at complete records: released WAL can reach into the record behind them.
            restart_lsn=min(restart, commit),
            segment_size=segment_size,
            limits=limits,
            primary_begin=primary_begin,
        )
        return cls(term, vcl, history, peers, membership, streaming)

    def take_over(self, peer: SafekeeperPeer) -> list[Effect]:
        """Bring a voter into this election epoch, from the divergence point of its log and ours (rules 3 and 6)."""
        reply, streaming = peer.reply, self.streaming
        assert reply is not None
        if identities.contradicts(reply, peer.identity, self.term, streaming):
            return self.distrust(peer)
        if peer.identity in self.membership.configuration.distrusted:
            return identities.distrusted(peer)
        configuration = self.membership.configuration
        taken = reply.history.latest_election_epoch == self.term
        if taken and streaming.can_feed(reply.flush_lsn):
            effects = self._holds(peer, reply.configuration.generation)
            return [*effects, *self._configure(peer), *streaming.start(peer, reply.flush_lsn)]
        start = reply.flush_lsn if taken else self._divergence(reply)
        # A log with an uncompacted history can end below the beginning of this one.
        begin = self.history.entries[0].start_lsn
        # A log that began beyond VCL after a full resync, and whose last record was cut off, cannot continue from there.
        begin = max(begin, reply.begin_lsn)
        rebuild = start is None or start < begin or not streaming.can_feed(start)
        if rebuild or start is None:
            start = max(streaming.oldest_kept(), self._first_segment())
            peer.begin_lsn = start
            # It drops what it has acknowledged, and may crash before it has received anything else.
            streaming.acked.pop(peer.identity, None)
        peer.state = PeerState.RECOVERING
        peer.generation = configuration.generation
        # Its first acknowledgement must equal this: WAL below was not sent in this term.
        peer.sent_lsn = start
        elected = m.Elected(
            self.term,
            start,
            max(streaming.commit_lsn, self._first_segment()),
            rebuild,
            self.history,
            configuration,
            self.ancestors,
        )
        return [SendMessage(peer.number, elected)]

    def distrust(self, peer: SafekeeperPeer) -> list[Effect]:
        """Void its promises: for this proposer at once, for every later one once a majority has persisted that."""
        configuration = self.membership.configuration
        void = configuration.distrusting(peer.identity)
        known = peer.identity not in configuration.trusted
        return [*identities.distrusted(peer), *([] if known else self.use(void))]

    def _first_segment(self) -> Lsn:
        """The first segment that begins inside the history: the earliest start of a full resync.

        Its start is committed, even if no voter knows: a history is pruned only up to the segment of an LSN that every member
        has (rule 7), its oldest election epoch reaches beyond that segment's start, and compaction keeps the beginning.
        """
        size = self.streaming.segment_size
        return -(-self.history.entries[0].start_lsn // size) * size

    def _divergence(self, reply: m.VoteReply) -> Lsn | None:
        return divergence(reply.history, reply.flush_lsn, self.history, self.vcl)

    def acknowledged(self, peer: SafekeeperPeer, ack: m.AppendAck) -> list[Effect]:
        """A safekeeper has adopted this election epoch, or has more WAL on disk."""
        streaming = self.streaming
        if ack.term != self.term:
            return []  # only acknowledgements of this term count (rule 4)
        if ack.flush_lsn > streaming.end:
            return [ClosePeer(peer.number)]  # it acknowledged WAL that was not sent
        effects: list[Effect] = []
        if peer.state == PeerState.RECOVERING:
            if ack.flush_lsn != peer.sent_lsn:
                return [ClosePeer(peer.number)]
            effects += self._holds(peer, peer.generation)
            effects += self._configure(peer)
            effects += streaming.start(peer, ack.flush_lsn)
        elif peer.state == PeerState.STREAMING:
            effects += streaming.acknowledged(peer, ack.flush_lsn)
        if ack.feedback is not None and ack.feedback != peer.feedback:
            peer.feedback = ack.feedback
            effects += self._pass_feedback()
        return (
            effects + self._next_membership()
            if self.membership.configuration.new_members
            else effects
        )

    def heartbeat(self) -> list[Effect]:
        """Time has passed. A safekeeper whose connection broke, and that has not come back, no longer holds back VACUUM."""
        return [*self.streaming.heartbeat(), *self._pass_feedback()]

    def _pass_feedback(self) -> list[Effect]:
        feedback = oldest(peer.feedback for peer in self.peers.values() if peer.feedback)
        if feedback == self.feedback:
            return []
        self.feedback = feedback
        return [PassFeedback(feedback)]

    # -- membership ---------------------------------------------------------------------------------

    def use(self, configuration: Configuration) -> list[Effect]:
        """Count by this membership from now on, and send it to be persisted."""
        self.membership.use(configuration)
        self.streaming.use(configuration)
        effects: list[Effect] = [MembersChanged(configuration)]
        for peer in self.peers.values():
            if peer.greeting and peer.identity not in configuration.everyone:
                effects.append(ClosePeer(peer.number))
            elif peer.state == PeerState.STREAMING:  # one that is recovering gets it afterwards
                effects += self._configure(peer)
        return [*effects, *self.streaming.advance()]

    def _configure(self, peer: SafekeeperPeer) -> list[Effect]:
        if self.membership.persisted.get(peer.identity) == self.membership.configuration.generation:
            return []
        return [SendMessage(peer.number, m.Configure(self.term, self.membership.configuration))]

    def persisted(self, peer: SafekeeperPeer, configured: m.Configured) -> list[Effect]:
        """A safekeeper holds a configuration of this term."""
        if configured.term != self.term:
            return []
        return [*self._holds(peer, configured.generation), *self._next_membership()]

    def _holds(self, peer: SafekeeperPeer, generation: int) -> list[Effect]:
        settled = self.membership.holds(peer.identity, generation)
        return [MembersSettled(self.membership.configuration)] if settled else []

    def _next_membership(self) -> list[Effect]:
        configuration = self.membership.next_step(self.streaming)
        return [] if configuration is None else self.use(configuration)
