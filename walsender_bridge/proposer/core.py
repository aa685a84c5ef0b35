"""The WAL proposer without its sockets and bytes: events in, ordered effects out.

    GREETING ──quorum greeted──▶ VOTING ──quorum voted──▶ COMPARING ──equal──▶ LEADING
        └──────────────┴─────────────────────┴──── refused, displaced, diverged ──┴──▶ STOPPED

Safety, with the rules of safekeeper/README.md:

- VCL is the end of the most advanced log among a quorum of *vote replies* (rule 1, `election.py`); no
  safekeeper takes part before its vote for this NodeId.
- The epoch is the term, which grew above every one that a quorum had heard of (rule 2).
- Each safekeeper is sent WAL from the divergence point of the two histories (rules 3, 6); it finds the same
  point for itself, or refuses.
- What is committed is decided in `streaming.py` (rules 4, 7, 8), with a majority of each membership
  (rule 10).
- One process has one NodeId: it resumes with it, and when it is refused it stops (rule 5).

The server that the WAL comes from must be the one whose WAL the quorum holds: the same system, a lineage
that goes on from VCL (`lineage.py`), no end before VCL, and the same bytes below VCL.
"""

from collections.abc import Collection
from enum import StrEnum

from walsender_bridge.errors import CorruptError, DivergedError, NotSupportedError
from walsender_bridge.proposer import election, lineage
from walsender_bridge.proposer.effects import (
    ClosePeer,
    CompareWal,
    Effect,
    Event,
    Limits,
    Lineage,
    MembersChanged,
    MembersWanted,
    PassFeedback,
    PeerClosed,
    PeerConnected,
    PeerFault,
    PeerReceived,
    Primary,
    PrimaryKeeps,
    SendMessage,
    SpillKeeps,
    StartStreaming,
    Stop,
    StopReason,
    Tick,
    WalCompared,
    WalRead,
    WalReceived,
)
from walsender_bridge.proposer.feedback import oldest
from walsender_bridge.proposer.membership import Membership
from walsender_bridge.proposer.peer import Peer, PeerState
from walsender_bridge.proposer.streaming import Streaming
from walsender_bridge.safekeeper import messages as m
from walsender_bridge.safekeeper.configuration import Configuration
from walsender_bridge.safekeeper.history import History, divergence
from walsender_bridge.wire.lsn import format_lsn


class Phase(StrEnum):
    """See the module."""

    GREETING = "greeting"
    VOTING = "voting"
    COMPARING = "comparing"
    LEADING = "leading"
    STOPPED = "stopped"


_STOPS = {
    m.Refusal.OLDER_TERM: StopReason.DISPLACED,
    m.Refusal.FENCED_TIMELINE: StopReason.FENCED,
    m.Refusal.OLDER_TIMELINE: StopReason.OTHER_HISTORY,
    m.Refusal.OTHER_SYSTEM: StopReason.OTHER_SERVER,
    m.Refusal.OTHER_MAJOR: StopReason.OTHER_SERVER,
    m.Refusal.OTHER_SEGMENT_SIZE: StopReason.OTHER_SERVER,
}


class Proposer:
    """See the module.

    `identity`: a UUID drawn for this process and stored nowhere. `peers`: how many addresses the driver has.
    `primary`: None for a failover, whose WAL is the best safekeeper's. `configuration`: the membership as
    the operator's file has it; a newer one that a safekeeper holds is taken instead.
    """

    def __init__(
        self,
        identity: int,
        server: m.ServerInfo,
        primary: Primary | None,
        configuration: Configuration,
        peers: int,
        *,
        purpose: m.Purpose = m.Purpose.ATTACH,
        limits: Limits | None = None,
        primary_begin: int | None = None,
    ) -> None:
        self.node_id = m.NodeId(0, identity)
        self.server = server
        self.primary = primary
        self.membership = Membership(configuration)
        self.peers = {number: Peer(number) for number in range(peers)}
        self.purpose = purpose
        self.limits = limits or Limits()
        self.primary_begin = primary_begin
        self.phase = Phase.GREETING
        self.best: m.VoteReply | None = None
        self.comparing: int | None = None
        self.history = History()
        self.vcl = 0
        self.streaming: Streaming | None = None
        self.feedback = m.HotStandbyFeedback()

    @property
    def configuration(self) -> Configuration:
        """The membership in force, as far as is known."""
        return self.membership.configuration

    def step(self, event: Event) -> list[Effect]:
        """What to do about an event. The hot ones come first."""
        if self.phase == Phase.STOPPED:
            return []
        streaming = self.streaming
        if isinstance(event, WalReceived):
            assert streaming is not None, "the primary streams once it was asked to"
            return streaming.received(event.begin_lsn, event.end_lsn)
        if isinstance(event, PeerReceived):
            peer = self.peers[event.peer]
            return [] if peer.state == PeerState.AWAY else self._received(peer, event.message)
        if isinstance(event, Tick):
            return self._compare() + (streaming.heartbeat() if streaming else [])
        if isinstance(event, WalRead):
            assert streaming is not None
            return streaming.was_read(self.peers[event.peer], event.begin_lsn, event.end_lsn)
        if isinstance(event, PeerConnected):
            peer = self.peers[event.peer]
            peer.state = PeerState.CONNECTED
            greeting = m.ProposerGreeting(self.server, self.node_id.proposer)
            return [SendMessage(peer.number, greeting)]
        if isinstance(event, PeerClosed):
            return self._closed(self.peers[event.peer])
        if isinstance(event, WalCompared):
            return self._compared(event)
        return self._told(event)

    def _told(self, event: SpillKeeps | PrimaryKeeps | MembersWanted) -> list[Effect]:
        streaming = self.streaming
        if isinstance(event, MembersWanted):
            return self._use(self.membership.begin(event.members, streaming))
        if isinstance(event, PrimaryKeeps):
            self.primary_begin = event.begin_lsn
            if streaming:
                streaming.primary_begin = event.begin_lsn
        elif streaming:
            streaming.spill = (event.begin_lsn, event.end_lsn)
        return []

    def _received(self, peer: Peer, message: m.ToProposer) -> list[Effect]:
        if isinstance(message, m.AppendAck):
            return self._acknowledged(peer, message)
        if isinstance(message, m.SafekeeperGreeting):
            return self._greeted(peer, message)
        if isinstance(message, m.VoteReply):
            return self._voted(peer, message)
        if isinstance(message, m.Configured):
            return self._persisted(peer, message)
        assert isinstance(message, m.Refused), message
        return self._refused(peer, message)

    # -- the end ------------------------------------------------------------------------------------

    def _stop(self, reason: StopReason, detail: str, by: m.NodeId | None = None) -> list[Effect]:
        self.phase = Phase.STOPPED
        return [Stop(reason, detail, by)]

    def _refused(self, peer: Peer, refused: m.Refused) -> list[Effect]:
        """Whoever is in the way of this proposer ends it (rule 5); other faults are one safekeeper's."""
        reason = _STOPS.get(refused.reason)
        if reason is None:
            return [PeerFault(peer.number, refused), ClosePeer(peer.number)]
        return self._stop(reason, refused.detail, refused.node_id)

    # -- greetings ----------------------------------------------------------------------------------

    def _closed(self, peer: Peer) -> list[Effect]:
        peer.closed()
        if self.phase != Phase.COMPARING:
            return []
        # Nothing depends on VCL yet: the voters that are left may be a quorum, too.
        self.phase, self.comparing = Phase.VOTING, None
        return self._decide()

    def _greeted(self, peer: Peer, greeting: m.SafekeeperGreeting) -> list[Effect]:
        peer.state = PeerState.GREETED
        peer.greeting = greeting
        if greeting.server.system_id and greeting.server != self.server:
            return self._stop(StopReason.OTHER_SERVER, f"its WAL is of {greeting.server}")
        if (
            self.primary is not None
            and greeting.timeline == self.primary.lineage.timeline
            and greeting.commit_lsn > self.primary.flush_lsn
        ):
            return self._ahead(greeting.commit_lsn)  # said before a vote displaces anybody
        if self.phase == Phase.GREETING:
            self.membership.learn(greeting.configuration)
            return self._propose()
        if peer.identity not in self.configuration.everyone:
            return self._ask(peer)
        if greeting.node_id == self.node_id:
            peer.state = PeerState.VOTING
            return [SendMessage(peer.number, m.Resume(self.node_id))]
        if greeting.node_id.term >= self.node_id.term:
            return self._stop(
                StopReason.DISPLACED, f"the vote went to {greeting.node_id}", greeting.node_id
            )
        return self._ask(peer)

    def _propose(self) -> list[Effect]:
        greetings = [peer.greeting for peer in self.peers.values() if peer.greeting]
        if not self.configuration.has_quorum({each.safekeeper for each in greetings}):
            return []
        self.phase = Phase.VOTING
        self.node_id = m.NodeId(election.next_term(greetings), self.node_id.proposer)
        return [effect for peer in self.peers.values() for effect in self._ask(peer)]

    def _ask(self, peer: Peer) -> list[Effect]:
        """For its vote, once, and only a member: nobody else's counts (rule 10)."""
        if peer.state != PeerState.GREETED:
            return []
        assert peer.greeting is not None
        if peer.identity not in self.configuration.everyone:
            detail = f"safekeeper {peer.identity:032x} is not a member"
            office = peer.greeting.node_id
            return [PeerFault(peer.number, m.Refused(m.Refusal.NOT_A_MEMBER, office, detail))]
        peer.state = PeerState.VOTING
        vote = m.Vote(self.node_id, self.purpose, self._timeline(), self.configuration)
        return [SendMessage(peer.number, vote)]

    def _timeline(self) -> int:
        """The primary's; a failover goes on with the one that stands."""
        if self.primary is not None:
            return self.primary.lineage.timeline
        greetings = [peer.greeting for peer in self.peers.values() if peer.greeting]
        return max((greeting.timeline for greeting in greetings), default=0)

    # -- the election -------------------------------------------------------------------------------

    def _voted(self, peer: Peer, reply: m.VoteReply) -> list[Effect]:
        if reply.node_id != self.node_id:
            return []  # an answer to nobody's question
        peer.state = PeerState.VOTED
        peer.reply = reply
        peer.begin_lsn = reply.begin_lsn
        if self.phase == Phase.LEADING:
            return self._take_over(peer)
        if self.phase == Phase.COMPARING:
            return self._compare()
        self.membership.learn(reply.configuration)
        return self._decide()

    def _replies(self) -> dict[int, m.VoteReply]:
        """The votes, by identity. One that was given stays given, but who is away cannot be read from."""
        return {peer.identity: peer.reply for peer in self.peers.values() if peer.reply}

    def _decide(self) -> list[Effect]:
        """With a quorum of votes: VCL, and whether this server may go on from there."""
        replies = self._replies()
        if not self.configuration.has_quorum(replies):
            return [effect for peer in self.peers.values() for effect in self._ask(peer)]
        voters = [r for member, r in replies.items() if member in self.configuration.everyone]
        try:
            self.best = election.volume_complete(voters)
            return self._go_on(self.best, voters)
        except DivergedError as error:
            return self._stop(StopReason.OTHER_HISTORY, str(error))
        except (CorruptError, NotSupportedError) as error:
            return self._stop(StopReason.BROKEN, str(error))

    def _go_on(self, best: m.VoteReply, voters: Collection[m.VoteReply]) -> list[Effect]:
        self.vcl = election.end(best)
        if not self.vcl:
            self.vcl = self._genesis()
        if self.primary is not None and self.primary.flush_lsn < self.vcl:
            return self._ahead(self.vcl)
        origin = self.primary.lineage if self.primary else Lineage(self._log_timeline(best))
        term = self.node_id.term
        entries = lineage.successors(best.history, self.vcl, term, origin)
        restart = max(reply.restart_lsn for reply in voters)
        floor = restart - restart % self.server.segment_size
        self.history = best.history.succeeded(self.vcl, entries).pruned(floor)
        self.phase = Phase.COMPARING
        return self._compare()

    def _genesis(self) -> int:
        """Nobody holds anything: the log begins with the segment that the primary is in."""
        if self.primary is None:
            raise DivergedError("the safekeepers hold no WAL to fail over to")
        return self.primary.flush_lsn - self.primary.flush_lsn % self.server.segment_size

    def _log_timeline(self, best: m.VoteReply) -> int:
        return best.history.timeline_at(self.vcl) if best.history else 0

    def _ahead(self, lsn: int) -> list[Effect]:
        assert self.primary is not None
        return self._stop(
            StopReason.AHEAD,
            f"the safekeepers hold WAL up to {format_lsn(lsn)}, this server ends at "
            f"{format_lsn(self.primary.flush_lsn)}: it was restored, or lost what it had flushed",
        )

    # -- is it the same WAL? ------------------------------------------------------------------------

    def _compare(self) -> list[Effect]:
        """Have the bytes below VCL compared with a voter that has them."""
        if self.phase != Phase.COMPARING or self.comparing is not None:
            return []
        assert self.best is not None
        if self.primary is None or not self.best.history:
            return self._lead()
        for peer in self.peers.values():
            reply = peer.reply
            if reply is not None and election.rank(reply) == election.rank(self.best):
                begin = max(self.vcl - self.limits.compare_bytes, reply.begin_lsn)
                if begin == self.vcl:
                    return self._lead()
                self.comparing = peer.number
                return [CompareWal(peer.number, begin, self.vcl)]
        raise AssertionError("VCL is of a voter whose connection stands")

    def _compared(self, compared: WalCompared) -> list[Effect]:
        if (self.comparing, self.vcl) != (compared.peer, compared.end_lsn):
            return []  # of a connection that broke
        self.comparing = None
        if compared.equal is None:
            return []  # a tick tries again
        if not compared.equal:
            return self._stop(
                StopReason.OTHER_BYTES,
                f"the WAL below {format_lsn(self.vcl)} is not what the safekeepers hold: this "
                "server is a copy that went its own way",
            )
        return self._lead()

    # -- in office ----------------------------------------------------------------------------------

    def _lead(self) -> list[Effect]:
        assert self.best is not None
        self.phase = Phase.LEADING
        self.membership.configuration = self.configuration.stamped(self.node_id.term)
        voters = self._replies().values()
        commit = max([0, self.best.commit_lsn, *(reply.commit_lsn for reply in voters)])
        restart = max([0, self.best.restart_lsn, *(reply.restart_lsn for reply in voters)])
        self.streaming = Streaming(
            self.peers,
            self.configuration,
            self.history,
            epoch_start=self.vcl,
            # An empty log is committed as far as it goes.
            commit_lsn=commit if self.best.history else self.vcl,
            restart_lsn=min(restart, self.vcl) if self.best.history else self.vcl,
            segment_size=self.server.segment_size,
            limits=self.limits,
            primary_begin=self.primary_begin if self.primary else None,
        )
        effects: list[Effect] = [StartStreaming(self.node_id, self.vcl)] if self.primary else []
        for peer in self.peers.values():
            effects += self._take_over(peer) if peer.state == PeerState.VOTED else self._ask(peer)
        return effects

    def _take_over(self, peer: Peer) -> list[Effect]:
        """Bring a voter into this epoch, where its log parts from ours (rules 3 and 6)."""
        reply, streaming = peer.reply, self.streaming
        assert reply is not None
        assert streaming is not None
        taken = reply.history.latest_epoch == self.node_id.term
        if taken and streaming.can_feed(reply.flush_lsn):
            self.membership.persisted[peer.identity] = reply.configuration.generation
            return [*self._configure(peer), *streaming.start(peer, reply.flush_lsn)]
        start = reply.flush_lsn if taken else self._divergence(reply)
        rebuild = start is None or not streaming.can_feed(start)
        if rebuild or start is None:
            start = max(streaming.oldest_kept(), self.history.entries[0].start_lsn)
            peer.begin_lsn = start
        peer.state = PeerState.TAKING
        peer.generation = self.configuration.generation
        # Acknowledged before anything is sent: what is below was never ours to send.
        peer.sent_lsn = start
        elected = m.Elected(
            self.node_id.term,
            start,
            streaming.commit_lsn,
            rebuild,
            self.history,
            self.configuration,
        )
        return [SendMessage(peer.number, elected)]

    def _divergence(self, reply: m.VoteReply) -> int | None:
        return divergence(reply.history, reply.flush_lsn, self.history, self.vcl)

    def _acknowledged(self, peer: Peer, ack: m.AppendAck) -> list[Effect]:
        streaming = self.streaming
        if streaming is None or ack.term != self.node_id.term:
            return []  # only acknowledgements of this term count (rule 4)
        effects: list[Effect] = []
        if peer.state == PeerState.TAKING:
            if ack.flush_lsn != peer.sent_lsn:
                return [ClosePeer(peer.number)]
            self.membership.persisted[peer.identity] = peer.generation
            effects += self._configure(peer)
            effects += streaming.start(peer, ack.flush_lsn)
        elif peer.state == PeerState.STREAMING:
            effects += streaming.acknowledged(peer, ack.flush_lsn)
        if ack.feedback is not None and ack.feedback != peer.feedback:
            peer.feedback = ack.feedback
            effects += self._pass_feedback()
        return effects + self._next_membership() if self.configuration.new_members else effects

    def _pass_feedback(self) -> list[Effect]:
        feedback = oldest(peer.feedback for peer in self.peers.values() if peer.feedback)
        if feedback == self.feedback:
            return []
        self.feedback = feedback
        return [PassFeedback(feedback)]

    # -- membership ---------------------------------------------------------------------------------

    def _use(self, configuration: Configuration) -> list[Effect]:
        """Count by this membership from now on, and have it persisted."""
        assert self.streaming is not None
        self.membership.configuration = self.streaming.configuration = configuration
        effects: list[Effect] = [MembersChanged(configuration)]
        for peer in self.peers.values():
            if peer.state == PeerState.GREETED:
                effects += self._ask(peer)
            elif peer.greeting and peer.identity not in configuration.everyone:
                effects.append(ClosePeer(peer.number))
            elif peer.state == PeerState.STREAMING:  # who is taking over is told when it has
                effects += self._configure(peer)
        return [*effects, *self.streaming.advance()]

    def _configure(self, peer: Peer) -> list[Effect]:
        if self.membership.persisted.get(peer.identity) == self.configuration.generation:
            return []
        return [SendMessage(peer.number, m.Configure(self.node_id.term, self.configuration))]

    def _persisted(self, peer: Peer, configured: m.Configured) -> list[Effect]:
        if configured.term != self.node_id.term:
            return []
        self.membership.persisted[peer.identity] = configured.generation
        return self._next_membership()

    def _next_membership(self) -> list[Effect]:
        assert self.streaming is not None
        configuration = self.membership.next_step(self.streaming)
        return [] if configuration is None else self._use(configuration)
