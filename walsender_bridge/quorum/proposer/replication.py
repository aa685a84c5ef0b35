"""The leader's WAL: how much each safekeeper has, what is committed, what may be released.

    restart_lsn          queue_begin      commit_lsn      end
        |     primary, or     |    memory     |            |
        |    a safekeeper     |               |            |

Invariants: `restart_lsn <= commit_lsn <= end`; `commit_lsn` and `restart_lsn` never fall (rule 7);
`commit_lsn` moves only to an LSN at or above the start of the election epoch (rule 4) that a majority of each
membership has acknowledged in this term (rule 10); `end - queue_begin <= queue_bytes` and at most
`inflight_bytes` are unacknowledged at one safekeeper (rule 8).

A safekeeper's position is one LSN, `sent_lsn`, which alone determines the source of its next bytes. So a laggard needs
no mode of its own: it is fed from whichever source has its bytes until it reaches the queue.
"""

from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.wal_page import segment_start
from walsender_bridge.quorum.proposer.effects import (
    AdvanceSlot,
    ClosePeer,
    Effect,
    Feedback,
    Limits,
    MarkRebuild,
    ReadWal,
    ReleaseWal,
    SendWal,
    WalSource,
)
from walsender_bridge.quorum.proposer.peer import PeerState, SafekeeperPeer
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History


class Streaming:
    """See the module. `commit_lsn`, `restart_lsn`: the greatest that the voters knew."""

    __slots__ = (
        "acked",
        "commit_lsn",
        "configuration",
        "end",
        "epoch_start",
        "established",
        "full",
        "history",
        "limits",
        "peers",
        "primary_begin",
        "queue_begin",
        "rebuild",
        "restart_lsn",
        "segment_size",
        "waiting",
    )

    def __init__(
        self,
        peers: dict[int, SafekeeperPeer],
        configuration: Configuration,
        history: History,
        *,
        epoch_start: Lsn,
        commit_lsn: Lsn,
        restart_lsn: Lsn,
        segment_size: int,
        limits: Limits,
        primary_begin: Lsn | None,
    ) -> None:
        self.peers = peers
        self.configuration = configuration
        self.history = history
        self.epoch_start = self.end = self.queue_begin = epoch_start
        self.commit_lsn = commit_lsn
        self.restart_lsn = restart_lsn
        self.segment_size = segment_size
        self.limits = limits
        #: The oldest LSN that the primary can still send; None without a primary.
        self.primary_begin = primary_begin
        #: What each member, by identity, has acknowledged in this term; it stays while the member is disconnected.
        self.acked: dict[int, Lsn] = {}
        #: Members whose WAL was released.
        self.rebuild: frozenset[int] = frozenset()
        #: Members whose disks are full, and what each had acknowledged then.
        self.full: dict[int, Lsn] = {}
        #: Ticks that commits have waited for disk space, at which LSN, and the member for which WAL is kept.
        self.waiting: tuple[int, Lsn, dict[int, Lsn]] = (0, 0, {})
        #: A quorum has everything up to VCL: from then on commit_lsn may advance.
        self.established = False

    # -- receiving WAL ------------------------------------------------------------------------------

    def received(self, begin_lsn: Lsn, end_lsn: Lsn) -> list[Effect]:
        """The primary sent WAL."""
        assert begin_lsn == self.end <= end_lsn, (begin_lsn, self.end)
        self.end = end_lsn
        effects = self.pump_all()
        return [*effects, *self.bound_queue(), *self._release_laggards()]

    def bound_queue(self) -> list[Effect]:
        """Keep the queue within its limit, even if laggards need more; and free what all have (rule 8)."""
        everywhere = min((self.acked.get(each, 0) for each in self.members), default=0)
        begin = max(self.queue_begin, min(everywhere, self.end), self._queue_floor())
        if begin == self.queue_begin:
            return []
        self.queue_begin = begin
        return [ReleaseWal(begin)]

    def _queue_floor(self) -> Lsn:
        return self.end - self.limits.queue_bytes

    @property
    def members(self) -> frozenset[int]:
        """The members whose acknowledgements count."""
        return self.configuration.trusted

    def use(self, configuration: Configuration) -> None:
        """Count by this membership. The full disk of a removed member no longer matters."""
        self.configuration = configuration
        self.full = {each: lsn for each, lsn in self.full.items() if each in self.members}

    # -- sending WAL --------------------------------------------------------------------------------

    def start(self, peer: SafekeeperPeer, lsn: Lsn) -> list[Effect]:
        """The safekeeper is in this election epoch and has everything below `lsn` on disk."""
        peer.state = PeerState.STREAMING
        peer.sent_lsn = lsn
        peer.reading = None
        return self.acknowledged(peer, lsn)

    def pump_all(self) -> list[Effect]:
        """Send whatever can be sent."""
        effects: list[Effect] = []
        for peer in self.peers.values():
            if peer.state == PeerState.STREAMING:
                self.pump(peer, effects)
        return effects

    def pump(self, peer: SafekeeperPeer, effects: list[Effect]) -> None:
        """Send to one safekeeper until it has everything, its limit is reached, or its bytes must be read first."""
        limits = self.limits
        while peer.reading is None and peer.sent_lsn < self.end:
            allowance = limits.inflight_bytes - (peer.sent_lsn - peer.flush_lsn)
            if allowance <= 0:
                return
            begin = peer.sent_lsn
            end = min(self.end, begin + limits.append_bytes, begin + allowance)
            boundary = self.history.boundary_after(begin)
            if boundary is not None:
                end = min(end, boundary)
            if begin < self.queue_begin:
                effects += self._read(peer, begin, min(end, self.queue_begin))
                return
            effects.append(self.send(peer, begin, end))

    def send(self, peer: SafekeeperPeer, begin: Lsn, end: Lsn) -> SendWal:
        """WAL, or a heartbeat when it is empty."""
        peer.sent_lsn = end
        return SendWal(peer.number, begin, end, self.commit_lsn, self.restart_lsn)

    def _read(self, peer: SafekeeperPeer, begin: Lsn, end: Lsn) -> list[Effect]:
        found = self.source(begin, end, peer.failed)
        if found is not None:
            peer.source, end, peer.donor = found
            peer.reading = end
            return [ReadWal(peer.number, peer.source, begin, end, peer.donor)]
        if peer.failed:
            peer.failed = frozenset()
            return []  # every source was tried: the next tick retries
        if begin >= self.oldest_kept():
            return []  # a safekeeper that has it may come back: each tick retries
        # No source is left. Its next connection starts with a full resync.
        peer.state = PeerState.AWAY
        return [*self._mark(peer.identity), ClosePeer(peer.number)]

    def source(
        self, begin: Lsn, end: Lsn, failed: frozenset[WalSource] = frozenset()
    ) -> tuple[WalSource, Lsn, int | None] | None:
        """The source of [begin, end), or of a first part of it: (source, end of the part, donor)."""
        kept = self.primary_begin is not None and self.primary_begin <= begin
        if kept and WalSource.PRIMARY not in failed:
            return WalSource.PRIMARY, end, None
        if WalSource.PEER in failed:
            return None
        segment = segment_start(begin, self.segment_size)
        best: SafekeeperPeer | None = None
        for donor in self.peers.values():
            holds = donor.begin_lsn <= begin < donor.flush_lsn and segment not in donor.unlent
            # A donor that hangs falls behind the others.
            better = best is None or donor.flush_lsn > best.flush_lsn
            if donor.state == PeerState.STREAMING and holds and better:
                best = donor
        if best is None:
            return None
        return WalSource.PEER, min(end, best.flush_lsn, segment + self.segment_size), best.number

    def oldest_kept(self) -> Lsn:
        """The start of the segment of `restart_lsn`: below it, no safekeeper guarantees to keep WAL."""
        return self.restart_lsn - self.restart_lsn % self.segment_size

    def was_read(self, peer: SafekeeperPeer, begin: Lsn, end: Lsn) -> list[Effect]:
        """The bytes for a safekeeper have been read."""
        if peer.reading is None or peer.state != PeerState.STREAMING:
            return []  # requested for a connection that is closed
        wanted, peer.reading = peer.reading, None
        if begin != peer.sent_lsn or not begin < end <= wanted:
            # It failed: try another source.
            assert peer.source is not None
            peer.failed |= {peer.source}
            donor = None if peer.donor is None else self.peers[peer.donor]
            if donor is not None and donor.state == PeerState.STREAMING:
                # The donor has removed that segment since its report, or holds it damaged: until it reconnects.
                donor.unlent |= {segment_start(peer.sent_lsn, self.segment_size)}
            effects: list[Effect] = []
        else:
            peer.failed = frozenset()
            effects = [self.send(peer, begin, end)]
        self.pump(peer, effects)
        return effects

    def heartbeat(self) -> list[Effect]:
        """Send commit_lsn to every follower, and retry what failed."""
        effects = [*self._release_on_full_disks(), *self.pump_all()]
        effects += [
            self.send(peer, peer.sent_lsn, peer.sent_lsn)
            for peer in self.peers.values()
            if peer.state == PeerState.STREAMING and peer.reading is None
        ]
        return effects

    # -- acknowledgements ---------------------------------------------------------------------------

    def acknowledged(self, peer: SafekeeperPeer, flush_lsn: Lsn) -> list[Effect]:
        """A safekeeper of this election epoch has everything below `flush_lsn` on disk."""
        assert flush_lsn <= self.end, (flush_lsn, self.end)
        peer.flush_lsn = flush_lsn
        identity = peer.identity
        self.acked[identity] = flush_lsn
        if flush_lsn > self.full.get(identity, flush_lsn):
            del self.full[identity]
        if identity in self.rebuild and flush_lsn >= self.restart_lsn:
            self.rebuild -= {identity}
        effects = self.advance()
        self.pump(peer, effects)
        return effects

    def advance(self) -> list[Effect]:
        """Commit, and release WAL, as far as the acknowledgements allow."""
        effects: list[Effect] = []
        candidate = self.configuration.quorum_lsn(self.acked)
        if may_commit(candidate, self.epoch_start):
            if candidate > self.commit_lsn or not self.established:
                self.commit_lsn = max(self.commit_lsn, candidate)
                effects.append(Feedback(self.commit_lsn))
            self.established = True
        effects += self._advance_restart()
        return [*effects, *self.bound_queue()]

    def _advance_restart(self) -> list[Effect]:
        kept = [self.acked.get(each, 0) for each in self.members if each not in self.rebuild]
        candidate = min([*kept, self.commit_lsn])
        if candidate <= self.restart_lsn:
            return []  # it never falls (rule 7)
        self.restart_lsn = candidate
        return [AdvanceSlot(candidate)]

    def _release_laggards(self) -> list[Effect]:
        """A safekeeper that is too far behind must not fill the primary's disk (rule 8)."""
        effects: list[Effect] = []
        # Lag is counted from commit_lsn: if the quorum itself hangs, commits hang with it.
        limit = min(self.end - self.limits.max_laggard_bytes, self.commit_lsn)
        if limit <= self.restart_lsn:
            return effects
        for each in self.members - self.rebuild:
            if max(self.acked.get(each, 0), self.restart_lsn) < limit:
                effects += self._mark(each)
        return [*effects, *self._advance_restart()] if effects else effects

    def disk_full(self, peer: SafekeeperPeer) -> None:
        """The safekeeper's disk was too full for the WAL that it was sent."""
        if peer.identity in self.members:
            self.full[peer.identity] = self.acked.get(peer.identity, 0)

    def _release_on_full_disks(self) -> list[Effect]:
        """When disks are full and commits wait, release the WAL of the member furthest behind sooner (rule 8).

        Every safekeeper keeps the WAL that one of them lacks. `max_laggard_bytes` bounds that only if the disks are larger; on
        smaller ones a single dead safekeeper would fill them all. Members that are catching up are waited for.
        """
        segment = self.commit_lsn - self.commit_lsn % self.segment_size
        lagging = {each: self.acked.get(each, 0) for each in self.members - self.rebuild}
        lagging = {each: lsn for each, lsn in lagging.items() if lsn < segment}
        ticks, commit_lsn, before = self.waiting
        if not self.full or not lagging or self.commit_lsn == self.end:
            self.waiting = (0, 0, {})
            return []
        same = (commit_lsn, before) == (self.commit_lsn, lagging)
        self.waiting = (ticks + 1 if same else 0, self.commit_lsn, lagging)
        if self.waiting[0] < self.limits.full_ticks:
            return []
        last = min(lagging.values())
        effects = [e for each, lsn in lagging.items() if lsn == last for e in self._mark(each)]
        return [*effects, *self._advance_restart()]

    def _mark(self, identity: int) -> list[Effect]:
        if identity in self.rebuild:
            return []
        self.rebuild |= {identity}
        return [MarkRebuild(identity)]

    def can_feed(self, lsn: Lsn) -> bool:
        """Whether a safekeeper whose log ends at `lsn` can be fed up to the end of the log."""
        return (
            lsn >= self.oldest_kept() or lsn >= self.queue_begin or bool(self.source(lsn, lsn + 1))
        )


def may_commit(candidate: Lsn, epoch_start: Lsn) -> bool:
    """A position that a quorum has counts only once the quorum is in this election epoch (rule 4)."""
    return candidate >= epoch_start
