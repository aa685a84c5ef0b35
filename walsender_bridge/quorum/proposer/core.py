"""The core of the WAL proposer, without sockets and WAL bytes: events in, ordered effects out.

    GREETING ──quorum greeted──▶ VOTING ──quorum voted──▶ COMPARING ──equal──▶ LEADING
        └──────────────┴─────────────────────┴──── displaced, outvoted, diverged ──┴──▶ STOPPED

Safety, with the rules of quorum/README.md:

- VCL is the end of the most advanced log among a quorum of *vote replies* (rule 1, `election.py`); no
  safekeeper takes part before its vote for this NodeId.
- The election epoch is the term, which exceeds every term that a quorum had heard of (rule 2).
- Once the proposer leads (`leader.py`), a safekeeper follows from the divergence point (rules 3, 6), and
`replication.py` (rules 4, 7, 8) decides what is committed, by a majority of each membership (rule 10).
- One process has one NodeId: it resumes with it. It stops for good when another was elected in its place, and
  campaigns again when only votes went elsewhere (rule 5, `rivals.py`).
- A fence takes effect only with a quorum, and so does a newer timeline. A proposer that gets a quorum of votes and
commits without those that withhold theirs has proved that the failover was never elected, or was aborted, and that
nothing on the newer timeline is committed: then it undoes what is left of both.

The source server must be the one whose WAL the quorum holds: the same system identifier, a lineage that continues
from VCL (`lineage.py`), an end not before VCL, and the same bytes below VCL.
"""

from collections.abc import Collection
from dataclasses import replace
from enum import StrEnum

from walsender_bridge.errors import CorruptError, DivergedError, NotSupportedError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.quorum.proposer import election, identities, lineage, rivals
from walsender_bridge.quorum.proposer.catch_up import same_wal
from walsender_bridge.quorum.proposer.catch_up.same_wal import ComparisonVerdict, SameWal
from walsender_bridge.quorum.proposer.effects import (
    ClosePeer,
    Effect,
    Event,
    Limits,
    LocatePrimary,
    MembersChanged,
    MembersWanted,
    PeerClosed,
    PeerConnected,
    PeerFault,
    PeerReceived,
    Primary,
    PrimaryAt,
    PrimaryKeeps,
    SendMessage,
    StartStreaming,
    Stop,
    StopReason,
    Tick,
    WalCompared,
    WalRead,
    WalReceived,
)
from walsender_bridge.quorum.proposer.leader import LeaderState
from walsender_bridge.quorum.proposer.membership import Membership
from walsender_bridge.quorum.proposer.peer import PeerState, SafekeeperPeer
from walsender_bridge.quorum.proposer.refusals import Refusals
from walsender_bridge.quorum.proposer.replication import Streaming
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History


class Phase(StrEnum):
    """See the module."""

    GREETING = "greeting"
    VOTING = "voting"
    COMPARING = "comparing"
    LEADING = "leading"
    STOPPED = "stopped"


class Proposer:
    """See the module.

    `identity`: a UUID drawn for this process and stored nowhere. `peers`: the number of addresses that the driver has; the
    first `configured` of them (None: all) are from the configuration, the others were found or requested since.
    `primary`: None for a failover, whose WAL is the best safekeeper's. `configuration`: the membership from the operator's
    file; a newer one of the same quorum that a safekeeper holds replaces it. `quorum`: its id, if the membership has none
    yet. `above`: an earlier `heard_term`. `primary_begin`: the oldest LSN that the primary's slot keeps. `may_begin`: no commit
    waits for the quorum, so one that has never held a record may begin again.
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
        primary_begin: Lsn | None = None,
        above: int = 0,
        quorum: int = 0,
        configured: int | None = None,
        may_begin: bool = False,
    ) -> None:
        self.node_id = m.NodeId(0, identity)
        self.server = server
        self.primary = primary
        self.membership = Membership(configuration, quorum)
        self.peers = {number: SafekeeperPeer(number) for number in range(peers)}
        self.configured = peers if configured is None else configured
        self.purpose = purpose
        self.limits = limits or Limits()
        self.primary_begin = primary_begin
        self.above = above
        self.may_begin = may_begin
        self.phase = Phase.GREETING
        self.best: m.VoteReply | None = None
        self.refusals = Refusals()
        #: Ticks since a vote was first seen to have gone to another proposer.
        self.outvoted_ticks = 0
        self.same_wal = SameWal()
        self.history = History()
        self.vcl = 0
        self.leader: LeaderState | None = None

    @property
    def streaming(self) -> Streaming | None:
        """The leader's WAL; None before the election."""
        return self.leader.streaming if self.leader else None

    @property
    def configuration(self) -> Configuration:
        """The membership in force, as far as it is known."""
        return self.membership.configuration

    @property
    def heard_term(self) -> int:
        """The greatest term that is known: the next campaign of this process exceeds it."""
        voted = [peer.rival.term for peer in self.peers.values() if peer.rival]
        return max([self.above, self.node_id.term, *voted])

    def step(self, event: Event) -> list[Effect]:
        """The effects of an event. Frequent events come first."""
        if self.phase == Phase.STOPPED:
            return []
        streaming = self.streaming
        if isinstance(event, WalReceived):
            assert streaming is not None, "the primary streams only after StartStreaming"
            return streaming.received(event.begin_lsn, event.end_lsn)
        if isinstance(event, PeerReceived):
            peer = self.peers[event.peer]
            return [] if peer.state == PeerState.AWAY else self._received(peer, event.message)
        if isinstance(event, Tick):
            if self.phase == Phase.GREETING:
                # No quorum yet: the previous proposer may have changed the members since they greeted.
                return self._greet([p for p in self.peers.values() if p.state == PeerState.GREETED])
            return self._compare() + (self.leader.heartbeat() if self.leader else []) + self._wait()
        if isinstance(event, WalRead):
            assert streaming is not None
            return streaming.was_read(self.peers[event.peer], event.begin_lsn, event.end_lsn)
        if isinstance(event, PeerConnected):
            peer = self.peers.setdefault(event.peer, SafekeeperPeer(event.peer))
            peer.state = PeerState.CONNECTED
            return self._greet([peer])
        if isinstance(event, PeerClosed):
            return self._closed(self.peers[event.peer])
        if isinstance(event, WalCompared):
            return self._compared(event)
        return self._external(event)

    def _external(self, event: PrimaryKeeps | PrimaryAt | MembersWanted) -> list[Effect]:
        streaming = self.streaming
        if isinstance(event, MembersWanted):
            return self._members_wanted(event.members)
        if isinstance(event, PrimaryAt):
            return self._located(event.flush_lsn)
        self.primary_begin = event.begin_lsn
        if streaming:
            streaming.primary_begin = event.begin_lsn
        return []

    def _received(self, peer: SafekeeperPeer, message: m.ToProposer) -> list[Effect]:
        if isinstance(message, m.AppendAck):
            return self.leader.acknowledged(peer, message) if self.leader else []
        if isinstance(message, m.SafekeeperGreeting):
            return self._greeted(peer, message)
        if isinstance(message, m.VoteReply):
            return self._voted(peer, message)
        if isinstance(message, m.Configured):
            return self._invited(self.leader.persisted(peer, message)) if self.leader else []
        assert isinstance(message, m.Refused), message
        return self._refused(peer, message)

    def _members_wanted(self, members: frozenset[int]) -> list[Effect]:
        """Raises `UsageError` when the membership cannot change now."""
        configuration = self.membership.begin(members, self.streaming)
        assert self.leader is not None
        return self._invited(self.leader.use(configuration))

    def _invited(self, effects: list[Effect]) -> list[Effect]:
        """Adds requests for the votes of those that have just become members."""
        if any(isinstance(effect, MembersChanged) for effect in effects):
            for peer in self.peers.values():
                effects += self._ask(peer)
        return effects

    # -- the end ------------------------------------------------------------------------------------

    def _stop(self, reason: StopReason, detail: str, by: m.NodeId | None = None) -> list[Effect]:
        self.phase = Phase.STOPPED
        return [Stop(reason, detail, by)]

    def _displaced(self, reason: StopReason, by: m.NodeId | None) -> list[Effect]:
        return self._stop(reason, f"the vote went to {by}", by)

    def _refused(self, peer: SafekeeperPeer, refused: m.Refused) -> list[Effect]:
        """A refusal that rules this proposer out ends it (`refusals.py`); any other is that safekeeper's fault."""
        if refused.reason == m.Refusal.OLDER_TERM:
            # The next greeting names the proposer that has the vote, and shows whether it was elected (rule 5).
            return [*self._outvoted(peer, refused.node_id), ClosePeer(peer.number)]
        if refused.reason == m.Refusal.DISK_FULL and self.streaming:
            self.streaming.disk_full(peer)
        here = {each.identity for each in self.peers.values() if each is not peer}
        reason = self.refusals.weigh(
            peer,
            refused.reason,
            self.configuration,
            self.configured,
            has_quorum=self.leader is not None or self.configuration.has_quorum(here),
        )
        if reason is None:
            return [PeerFault(peer.number, refused), ClosePeer(peer.number)]
        return self._stop(reason, refused.detail, refused.node_id)

    def _outvoted(self, peer: SafekeeperPeer, voted: m.NodeId) -> list[Effect]:
        """A safekeeper's vote is known: one for another proposer is lost to this term."""
        peers = self.peers.values()
        return [*rivals.outvoted(peer, voted, self.node_id, self.configuration, peers)]

    def _wait(self) -> list[Effect]:
        """Wait for a rival to be elected; if none is, this process campaigns again."""
        outvoted = [peer for peer in self.peers.values() if peer.rival]
        if not outvoted:
            return []
        self.outvoted_ticks += 1
        if self.outvoted_ticks > rivals.patience(self.limits.patience_ticks, self.node_id.proposer):
            return self._displaced(StopReason.OUTVOTED, outvoted[0].rival)
        return self._greet([peer for peer in outvoted if peer.state == PeerState.GREETED])

    # -- greetings ----------------------------------------------------------------------------------

    def _closed(self, peer: SafekeeperPeer) -> list[Effect]:
        peer.closed()
        return self._decide_again() if self.phase == Phase.COMPARING else []

    def _decide_again(self) -> list[Effect]:
        """Nothing depends on VCL yet: decide again by the present votes."""
        self.phase = Phase.VOTING
        self.same_wal.forget()
        return self._decide()

    def _greet(self, peers: Collection[SafekeeperPeer]) -> list[Effect]:
        greeting = m.ProposerGreeting(self.server, self.node_id.proposer, self.membership.quorum)
        return [SendMessage(peer.number, greeting) for peer in peers]

    def _greeted(self, peer: SafekeeperPeer, greeting: m.SafekeeperGreeting) -> list[Effect]:
        if peer.state not in {PeerState.CONNECTED, PeerState.GREETED}:
            return []  # it was greeted again, and its vote requested before the answer arrived
        if greeting.server.system_id and greeting.server != self.server:
            other = f"its WAL is of {greeting.server}"
            return self._refused(peer, m.Refused(m.Refusal.OTHER_SYSTEM, greeting.node_id, other))
        if foreign := self.membership.foreign(greeting.configuration):
            return self._refused(peer, m.Refused(m.Refusal.OTHER_QUORUM, greeting.node_id, foreign))
        is_new = peer.state == PeerState.CONNECTED
        peer.state = PeerState.GREETED
        peer.greeting = greeting
        self.refusals.greeted(peer)
        if copied := identities.check(peer, self.peers.values()):
            return copied
        if self.leader and identities.rolled_back(peer, self.node_id, self.leader.streaming):
            again, peer.doubted = not peer.doubted, True
            return self._greet([peer]) if again else self.leader.distrust(peer)
        if self.phase == Phase.GREETING:
            self.membership.learn(greeting.configuration, peer.identity)
            stranger = identities.stranger(peer, self.configuration) if is_new else []
            return self._propose() or stranger
        if peer.identity not in self.configuration.everyone:
            peer.rival = None
            effects = self._ask(peer)
        elif rivals.has_leader(greeting, self.node_id, leads=self.phase == Phase.LEADING):
            return self._displaced(StopReason.DISPLACED, greeting.node_id)
        else:
            effects = self._outvoted(peer, greeting.node_id) or (
                [] if peer.rival else self._ask(peer)
            )
        return [*effects, *self._learn(greeting.configuration, peer.identity)]

    def _learn(self, configuration: Configuration, holder: int) -> list[Effect]:
        """Learn a membership after the vote was requested, from voters and others: a voter may have become distrusted."""
        if self.phase not in {Phase.VOTING, Phase.COMPARING}:
            return []
        before = self.configuration
        self.membership.learn(configuration, holder)
        return self._decide_again() if self.configuration != before else []

    def _greetings(self) -> list[m.SafekeeperGreeting]:
        return [peer.greeting for peer in self.peers.values() if peer.greeting]

    def _propose(self) -> list[Effect]:
        greetings = self._greetings()
        if not self.configuration.has_quorum({each.safekeeper for each in greetings}):
            return []
        if election.behind(greetings, self.primary):
            return [LocatePrimary()]  # before a vote displaces another proposer
        term = election.next_term(greetings, self.configuration, self.above)
        if not term:
            far = election.too_far(greetings, self.configuration)
            return [*rivals.left_out(self.peers.values(), far)]
        self.phase = Phase.VOTING
        self.node_id = m.NodeId(term, self.node_id.proposer)
        return [effect for peer in self.peers.values() for effect in self._ask(peer)]

    def _located(self, flush_lsn: Lsn) -> list[Effect]:
        """The primary's current flush position: if it is still too low, the primary lacks WAL that the safekeepers have."""
        assert self.primary is not None
        self.primary = replace(self.primary, flush_lsn=flush_lsn)
        if self.phase == Phase.GREETING:
            greetings = self._greetings()
            if election.behind(greetings, self.primary):
                return self._ahead(max(greeting.commit_lsn for greeting in greetings))
            return self._propose()
        if self.phase != Phase.COMPARING or self.best is None:
            return []
        if flush_lsn >= self.vcl:
            return self._compare()
        # A log that begins with the slot's segment begins with WAL that is flushed soon: the next tick asks again.
        return self._ahead(self.vcl) if self.best.history else []

    def _ask(self, peer: SafekeeperPeer) -> list[Effect]:
        """Request its vote, once, and of members only: no other vote counts (rule 10)."""
        if peer.state != PeerState.GREETED:
            return []
        if stranger := identities.stranger(peer, self.configuration):
            return stranger
        if peer.identity in self.configuration.distrusted:
            return identities.distrusted(peer)
        peer.state = PeerState.VOTING
        if peer.greeting is not None and peer.greeting.node_id == self.node_id:
            # It has voted for this process: before its connection broke, or before it became a member again.
            return [SendMessage(peer.number, m.Resume(self.node_id))]
        commits = self.leader is not None and self.leader.streaming.established
        void = commits and peer.identity in self.refusals.withheld
        purpose = m.Purpose.ABORT if void else self.purpose
        timeline = election.timeline(self._greetings(), self.primary)
        vote = m.Vote(self.node_id, purpose, timeline, self.membership.proposed)
        return [SendMessage(peer.number, vote)]

    # -- the election -------------------------------------------------------------------------------

    def _voted(self, peer: SafekeeperPeer, reply: m.VoteReply) -> list[Effect]:
        if reply.node_id != self.node_id:
            return []  # the answer to another election
        peer.state = PeerState.VOTED
        peer.reply = reply
        self.refusals.voted(peer)
        peer.begin_lsn = reply.begin_lsn
        if self.phase == Phase.LEADING:
            assert self.leader is not None
            return self.leader.take_over(peer)
        if learned := self._learn(reply.configuration, peer.identity):
            return learned
        if self.phase != Phase.COMPARING:
            return self._decide()
        # More is committed than the first voters hold, who lost it or lag: this voter may have it.
        return self._decide_again() if reply.commit_lsn > self.vcl else self._compare()

    def _replies(self) -> dict[int, m.VoteReply]:
        """The votes, by identity. A vote stays given, but a disconnected voter cannot be read from."""
        return {peer.identity: peer.reply for peer in self.peers.values() if peer.reply}

    def _voters(self) -> list[m.VoteReply]:
        """The votes that count: a voter may be distrusted since."""
        trusted = self.configuration.trusted
        return [reply for member, reply in self._replies().items() if member in trusted]

    def _decide(self) -> list[Effect]:
        """With a quorum of votes: determine VCL, and whether this server may continue from there."""
        if not self.configuration.has_quorum(self._replies()):
            return [effect for peer in self.peers.values() for effect in self._ask(peer)]
        voters = self._voters()
        try:
            self.best = election.volume_complete(voters)
            return self._go_on(self.best, voters)
        except DivergedError as error:
            return self._stop(StopReason.OTHER_HISTORY, str(error))
        except (CorruptError, NotSupportedError) as error:
            return self._stop(StopReason.BROKEN, str(error))

    def _go_on(self, best: m.VoteReply, voters: Collection[m.VoteReply]) -> list[Effect]:
        kept = self.primary_begin
        if (
            self.primary
            and self.may_begin
            and election.begins_again(best, voters, kept, self.server)
        ):
            # The server continues the log's timeline nevertheless.
            lineage.successors(
                best.history, election.end(best), self.node_id.term, self.primary.lineage
            )
            best = self.best = election.emptied(best)
        self.vcl = election.end(best) or election.genesis(self.primary, kept, self.server)
        if self.primary is None and self.vcl <= best.history.entries[0].start_lsn:
            # The log begins inside a record, and a standby is promoted at the end of a record: below it.
            raise DivergedError("the safekeepers hold no complete record to fail over to")
        log = best.history
        origin = self.primary.lineage if self.primary else lineage.of_log(log, self.vcl)
        entries = lineage.successors(log, self.vcl, self.node_id.term, origin)
        self.history = election.history(best, voters, self.vcl, entries, self.server, self.limits)
        self.phase = Phase.COMPARING
        return self._compare()

    def _ahead(self, lsn: Lsn) -> list[Effect]:
        assert self.primary is not None
        return self._stop(StopReason.AHEAD, election.ahead(lsn, self.primary))

    # -- is it the same WAL? ------------------------------------------------------------------------

    def _compare(self) -> list[Effect]:
        """Compare the bytes below VCL with the voters that have them; then lead."""
        if self.phase != Phase.COMPARING or self.same_wal.wanted is not None:
            return []
        assert self.best is not None
        if self.primary is None:
            return self._lead()
        if self.primary.flush_lsn < self.vcl:
            return [LocatePrimary()]
        if not self.best.history:
            return self._lead()
        peers = self.peers.values()
        wanted = self.same_wal.ask(self.best, self.vcl, peers, self.limits, self.server)
        return [wanted] if wanted else self._lead()

    def _compared(self, compared: WalCompared) -> list[Effect]:
        replies = self._replies().values()
        verdict = self.same_wal.answered(compared, self.best, replies)
        if verdict == ComparisonVerdict.EQUAL:
            return self._compare()
        if verdict == ComparisonVerdict.OTHER:
            return self._stop(StopReason.OTHER_BYTES, same_wal.other(self.vcl))
        if verdict == ComparisonVerdict.REMOVED:
            if self.primary and same_wal.may_lack(self.vcl, self.primary.lineage, self.server):
                return self._lead()
            return self._stop(StopReason.REMOVED, same_wal.removed(self.vcl))
        return self._decide_again() if verdict == ComparisonVerdict.OUTRANKED else []

    # -- leading ------------------------------------------------------------------------------------

    def _lead(self) -> list[Effect]:
        assert self.best is not None
        self.phase = Phase.LEADING
        stamped = self.configuration.stamped(self.node_id.term, self.membership.quorum)
        self.membership.use(stamped)
        leader = LeaderState.elected(
            self.node_id.term,
            self.vcl,
            self.history,
            self.peers,
            self.membership,
            self.best,
            self._voters(),
            self.server.segment_size,
            self.limits,
            self.primary_begin if self.primary else None,
        )
        self.leader = leader
        leader.ancestors = self.primary.lineage.switches if self.primary else ()
        effects: list[Effect] = [StartStreaming(self.node_id, self.vcl)] if self.primary else []
        for peer in self.peers.values():
            effects += leader.take_over(peer) if peer.state == PeerState.VOTED else self._ask(peer)
        return effects
