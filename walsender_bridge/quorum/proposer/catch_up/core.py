"""Catch-up: which older WAL is read from which safekeeper, and sent to which. Pure.

After a full resync a member holds no WAL below `restart_lsn`, while others keep it for readers. Each reports with `Held`
the LSN from which it should keep WAL. The WAL that it lacks is read from another safekeeper and sent in pieces, a
segment at a time, downward; the receiver verifies each segment before it adds it to its log.

Safety. Donor and receiver have both adopted the history of this term, so their logs are equal as far as both reach; and
only committed WAL is requested. A safekeeper that is not in this term may hold other bytes at the same LSNs, so it is no
donor. A donor sends no segment that differs from what it received (`safekeeper/lending.py`).

Commits come first: at most `backfill_bytes` are requested between two ticks, and one piece at a time per receiver.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.wal_page import segment_start
from walsender_bridge.quorum.proposer.effects import (
    Lineage,
    ReadCatchUpWal,
    SendCatchUpWal,
    SendMessage,
)
from walsender_bridge.quorum.proposer.peer import PeerState, SafekeeperPeer
from walsender_bridge.quorum.proposer.replication import Streaming
from walsender_bridge.quorum.protocol import messages as m

#: Ticks until donors that could not send a segment are retried, the first time; then twice as many, up to the maximum.
#: A donor may only have been restarted, or have been replaced by another safekeeper.
_RETRY_TICKS = 10
_MOST_RETRY_TICKS = 300


@dataclass(slots=True)
class _Receiver:
    """`segment`: the one being sent; `donors`: its sources; `whole`: sent to its end.

    `bad`: donors that could not send it, or whose copy was rejected. `rounds`: how often no donor was left; `waiting`: none
    is left now, for `retry_ticks` more.
    """

    wanted_lsn: Lsn = 0
    reading: bool = False
    segment: Lsn = 0
    whole: bool = False
    donors: frozenset[int] = frozenset()
    bad: frozenset[int] = frozenset()
    waiting: bool = False
    retry_ticks: int = 0
    rounds: int = 0


class CatchUp:
    """See the module. `lineage`: the primary's, which knows the timeline of all of its WAL."""

    def __init__(self, lineage: Lineage, segment_size: int) -> None:
        self.lineage = lineage
        self.segment_size = segment_size
        #: Bytes that may still be requested before the next tick.
        self.budget = 0
        self._receivers: dict[int, _Receiver] = {}

    def tick(self, streaming: Streaming, term: int) -> list[SendMessage]:
        """Time has passed: ask every follower what it holds."""
        self.budget = streaming.limits.backfill_bytes
        if not self.budget:
            return []
        for receiver in self._receivers.values():
            receiver.retry_ticks = max(receiver.retry_ticks - 1, 0)
        followers = [p for p in streaming.peers.values() if p.state == PeerState.STREAMING]
        return [SendMessage(peer.number, m.Fetch(term, 0, 0)) for peer in followers]

    def held(
        self, peer: SafekeeperPeer, held: m.Held, streaming: Streaming
    ) -> list[ReadCatchUpWal]:
        """A safekeeper of this term reports what it holds, and the LSN of the next piece."""
        if peer.state != PeerState.STREAMING:
            return []
        peer.begin_lsn = held.begin_lsn
        receiver = self._receivers.setdefault(peer.number, _Receiver())
        receiver.wanted_lsn = held.wanted_lsn
        if not held.next_lsn or receiver.reading:
            return []
        self._at(receiver, held.next_lsn)
        end = min(
            held.next_lsn + streaming.limits.append_bytes,
            receiver.segment + self.segment_size,
            streaming.commit_lsn,
        )
        donor = self._donor(peer, receiver, end, streaming.peers)
        if donor is None and receiver.bad:
            self._wait(receiver)
        if donor is None or self.budget <= 0 or end <= held.next_lsn:
            return []
        self.budget -= end - held.next_lsn
        receiver.reading = True
        receiver.donors |= {donor.number}
        return [ReadCatchUpWal(peer.number, held.next_lsn, end, donor.number)]

    def _at(self, receiver: _Receiver, lsn: Lsn) -> None:
        segment = segment_start(lsn, self.segment_size)
        if segment != receiver.segment:
            receiver.segment, receiver.whole = segment, False
            receiver.donors = receiver.bad = frozenset()
            receiver.waiting, receiver.rounds = False, 0
        elif lsn == segment and receiver.whole:
            # It received all of the segment, and requests it again: the copy was rejected.
            receiver.bad |= receiver.donors
            receiver.whole, receiver.donors = False, frozenset()

    def _donor(
        self,
        peer: SafekeeperPeer,
        receiver: _Receiver,
        end: Lsn,
        peers: Mapping[int, SafekeeperPeer],
    ) -> SafekeeperPeer | None:
        for donor in peers.values():
            if donor.state != PeerState.STREAMING or donor is peer:
                continue
            holds = 0 < donor.begin_lsn <= receiver.segment and end <= donor.flush_lsn
            if holds and donor.number not in receiver.bad:
                return donor
        return None

    def _wait(self, receiver: _Receiver) -> None:
        """No donor is left; after a while all are retried."""
        if not receiver.waiting:
            receiver.waiting = True
            receiver.retry_ticks = min(_RETRY_TICKS << min(receiver.rounds, 8), _MOST_RETRY_TICKS)
            receiver.rounds += 1
        elif not receiver.retry_ticks:
            receiver.waiting, receiver.bad = False, frozenset()

    def was_read(
        self, read: ReadCatchUpWal, length: int, streaming: Streaming
    ) -> list[SendCatchUpWal]:
        """The bytes have been read; none: the donor no longer holds them, or has disconnected."""
        peer = streaming.peers[read.peer]
        receiver = self._receivers[read.peer]
        receiver.reading = False
        if not length:
            receiver.bad |= {read.donor}
            return []
        if peer.state != PeerState.STREAMING:
            return []  # its connection broke meanwhile; it reports its position again
        receiver.whole = read.end_lsn == receiver.segment + self.segment_size
        timeline = self.lineage.timeline_at(receiver.segment + self.segment_size - 1)
        return [SendCatchUpWal(peer.number, read.begin_lsn, read.end_lsn, timeline)]

    def goal(self, peer: SafekeeperPeer, streaming: Streaming) -> Lsn | None:
        """The LSN down to which a safekeeper catches up; None: it lacks no WAL that another one has."""
        receiver = self._receivers.get(peer.number)
        if receiver is None or peer.state != PeerState.STREAMING:
            return None
        begins = [
            donor.begin_lsn
            for donor in streaming.peers.values()
            if donor is not peer and donor.state == PeerState.STREAMING
        ]
        goal = max(receiver.wanted_lsn, min(begins, default=peer.begin_lsn))
        return goal if goal < peer.begin_lsn else None

    def stuck(self, peer: SafekeeperPeer) -> bool:
        """Whether the next segment could not be read from any donor, or every copy was rejected, even after a retry."""
        receiver = self._receivers.get(peer.number)
        return receiver is not None and receiver.rounds > 1
