"""Each safety rule, broken in one small place, for the simulator and the explorer to detect.

A mutant replaces one function or method of the cores, or a driver's handling of one effect. The product has no hooks for
it.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

from tests.support.quorum import safekeeper_host, wal
from tests.support.quorum.explorer import Cluster
from walsender_bridge.quorum.proposer import core as proposer_core
from walsender_bridge.quorum.proposer import (
    election,
    identities,
    leader,
    lineage,
    membership,
    quorum_id,
    rivals,
)
from walsender_bridge.quorum.proposer import replication as streaming
from walsender_bridge.quorum.proposer.catch_up.core import CatchUp
from walsender_bridge.quorum.proposer.catch_up.same_wal import SameWal
from walsender_bridge.quorum.proposer.effects import (
    MembersSettled,
    ReadCatchUpWal,
    SendCatchUpWal,
    StopReason,
)
from walsender_bridge.quorum.proposer.peer import PeerState
from walsender_bridge.quorum.proposer.refusals import Refusals
from walsender_bridge.quorum.proposer.replication import Streaming
from walsender_bridge.quorum.protocol import configuration, terms
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.history import History, HistoryEntry
from walsender_bridge.quorum.safekeeper import core, effects, votes
from walsender_bridge.quorum.safekeeper.core import Safekeeper

Patch = tuple[object, str, object]


def _one_voter_compared() -> list[Patch]:
    """The server is compared only with the first of the most advanced voters, however little WAL that has."""
    ask = SameWal.ask

    def first(self: SameWal, best: m.VoteReply, vcl: int, peers: Any, *rest: Any) -> Any:
        chosen = [p for p in peers if p.reply and election.rank(p.reply) == election.rank(best)]
        return ask(self, best, vcl, chosen[:1], *rest)

    return [(SameWal, "ask", first)]


def _begins_below_the_slot() -> list[Patch]:
    """A new quorum begins with the segment of the server's position, whatever its slot keeps."""
    genesis = election.genesis

    def current(primary: Any, _kept: int | None, server: m.ServerInfo) -> int:
        return genesis(primary, None, server)

    return [(election, "genesis", current)]


def _never_begins_again() -> list[Patch]:
    """A quorum without a byte waits for WAL that its server has removed."""
    return [(election, "begins_again", lambda *_: False)]


def _what_the_greeting_knew() -> list[Patch]:
    """Rule 1: VCL from what was held before the vote."""
    greeting, aligned = Safekeeper._greeting, Safekeeper._aligned

    def note(self: Safekeeper, conn: int, message: m.ProposerGreeting) -> list[effects.Effect]:
        result = greeting(self, conn, message)
        known: Any = self.control.history, self.flush_lsn
        # Kept in the core, so that a copy of it has it, too; connections are not negative.
        self.greeted = {**self.greeted, -1 - conn: known}
        return result

    def tell(self: Safekeeper, answer: effects.WalAligned) -> list[effects.Effect]:
        owner = self.owner
        result = aligned(self, answer)
        if owner is None or self.taken:
            return result
        known: Any = self.greeted
        history, flush_lsn = known.get(-1 - owner, (self.control.history, 0))
        for index, effect in enumerate(result):
            if isinstance(effect, effects.SendMessage) and isinstance(effect.message, m.VoteReply):
                end = min(flush_lsn, effect.message.flush_lsn)
                result[index] = replace(
                    effect, message=replace(effect.message, history=history, flush_lsn=end)
                )
        return result

    return [(Safekeeper, "_greeting", note), (Safekeeper, "_aligned", tell)]


def _equal_terms() -> list[Patch]:
    """Rule 2: a vote for an equal term, of another proposer."""

    def outranks(candidate: m.NodeId, leader: m.NodeId) -> bool:
        return candidate.term >= leader.term and candidate != leader

    return [(votes, "outranks", outranks)]


def _next_epoch() -> list[Patch]:
    """Rule 2: the election epoch is one more than the last one, even if another proposer has used it."""
    succeeded = lineage.successors

    def successors(log: History, vcl: int, term: int, origin: Any) -> tuple[HistoryEntry, ...]:
        epoch = (log.counted(vcl)[-1].election_epoch if log.counted(vcl) else 0) + 1
        return tuple(
            replace(entry, election_epoch=epoch) for entry in succeeded(log, vcl, term, origin)
        )

    return [(lineage, "successors", successors)]


def _no_truncation() -> list[Patch]:
    """Rule 3: the tail stays; only the position is set back."""
    return [
        (wal.Disk, "truncate", lambda _self, _lsn: None),
        (Cluster, "truncated", lambda _self, held, _lsn: held),
    ]


def _history_first() -> list[Patch]:
    """Rule 3: the history is persisted before the tail is gone."""
    elected = Safekeeper._elected

    def hasty(self: Safekeeper, conn: int, message: m.Elected) -> list[effects.Effect]:
        ordered = elected(self, conn, message)
        return sorted(ordered, key=lambda effect: not isinstance(effect, effects.PersistControl))

    return [(Safekeeper, "_elected", hasty)]


def _older_epochs_commit() -> list[Patch]:
    """Rule 4: a quorum's position commits before the quorum is in the election epoch."""
    return [(streaming, "may_commit", lambda _candidate, _epoch_start: True)]


def _votes_are_acks() -> list[Patch]:
    """Rule 4: a vote counts as an acknowledgement of everything up to VCL."""
    lead = proposer_core.Proposer._lead

    def count(self: proposer_core.Proposer) -> list[Any]:
        result = lead(self)
        assert self.streaming is not None
        for identity in self._replies():
            self.streaming.acked.setdefault(identity, self.vcl)
        return result + self.streaming.advance()

    return [(proposer_core.Proposer, "_lead", count)]


def _resumption_truncates() -> list[Patch]:
    """Rule 5: a resumption goes back to the start of the election epoch."""
    resume = Safekeeper._resume

    def back(self: Safekeeper, conn: int, message: m.Resume) -> list[effects.Effect]:
        if message.node_id == self.control.node_id and self.taken:
            start = self.control.history.start_of(self.control.node_id.term)
            if start < self.written_lsn:
                self.flush_lsn = self.written_lsn = start
                return [effects.TruncateWal(start), *resume(self, conn, message)]
        return resume(self, conn, message)

    return [(Safekeeper, "_resume", back)]


def _displaced_by_a_vote() -> list[Patch]:
    """Rule 5: a proposer with a safekeeper's vote in a term of ours or above counts as the leader."""

    def has_leader(greeting: m.SafekeeperGreeting, own: m.NodeId, *, leads: bool) -> bool:
        return rivals.outvotes(greeting.node_id, own)

    return [(rivals, "has_leader", has_leader)]


def _outvoted_for_ever() -> list[Patch]:
    """Rule 5: a proposer that was outvoted never campaigns again."""
    return [(proposer_core.Proposer, "_wait", lambda _self: [])]


def _terms_without_a_bound() -> list[Patch]:
    """Rule 2: any greater term is voted for, and outbid."""
    return [(terms, "follows", lambda *_: True)]


def _any_term_is_outbid() -> list[Patch]:
    """Rule 2: the next term is above all known ones, including those out of reach."""

    def above_all(greetings: Any, _configuration: Any, heard: int = 0) -> int:
        return max([heard, *(each.node_id.term for each in greetings)]) + 1

    return [(election, "next_term", above_all)]


def _out_of_reach_and_waited_for() -> list[Patch]:
    """Rule 5: a vote that no election reaches is campaigned against, again and again."""
    return [(rivals, "out_of_reach", lambda _voted, _own: False)]


def _any_newer_timeline() -> list[Patch]:
    """One safekeeper with a newer timeline ends a proposer that has a quorum."""
    weigh = Refusals.weigh

    def hasty(self: Refusals, peer: Any, reason: m.Refusal, *rest: Any, **more: Any) -> Any:
        newer = reason == m.Refusal.OLDER_TIMELINE
        return StopReason.OTHER_HISTORY if newer else weigh(self, peer, reason, *rest, **more)

    return [(Refusals, "weigh", hasty)]


def _any_strangers() -> list[Patch]:
    """Safekeepers of another quorum at most addresses end a proposer that a quorum of its own follows."""
    weigh = Refusals.weigh

    def hasty(self: Refusals, *args: Any, has_quorum: bool) -> Any:
        assert has_quorum in {True, False}
        return weigh(self, *args, has_quorum=False)

    return [(Refusals, "weigh", hasty)]


def _newer_timelines_stay() -> list[Patch]:
    """A newer timeline of a minority is never undone: that safekeeper follows no proposer any more."""
    weigh = Refusals.weigh

    def forget(self: Refusals, peer: Any, reason: m.Refusal, *rest: Any, **more: Any) -> Any:
        stop = weigh(self, peer, reason, *rest, **more)
        if reason == m.Refusal.OLDER_TIMELINE:
            self.voted(peer)
        return stop

    return [(Refusals, "weigh", forget)]


def _never_stops() -> list[Patch]:
    """Rule 5: a proposer that was displaced elects itself again."""
    refused = proposer_core.Proposer._refused

    def again(self: proposer_core.Proposer, peer: Any, message: m.Refused) -> list[Any]:
        if message.reason != m.Refusal.OLDER_TERM:
            return refused(self, peer, message)
        self.node_id = m.NodeId(message.node_id.term + 1, self.node_id.proposer)
        self.phase = proposer_core.Phase.VOTING
        self.leader = None
        result: list[Any] = []
        for each in self.peers.values():
            each.reply = None
            if each.greeting and each.state != "away":
                each.state = PeerState.GREETED
                result += self._ask(each)
        return result

    return [(proposer_core.Proposer, "_refused", again)]


def _by_position_alone() -> list[Patch]:
    """Rule 6: any WAL below the leader's end counts as the leader's."""

    def alone(_log: History, flush_lsn: int, _leader: History, leader_end: int) -> int | None:
        return min(flush_lsn, leader_end) or None

    return [(core, "divergence", alone), (leader, "divergence", alone)]


def _uncommitted_epochs_compacted() -> list[Patch]:
    """Rule 6: a full history merges its oldest election epochs, committed or not."""
    compacted = History.compacted

    def bold(self: History, limit: int, _commit_lsn: int) -> History:
        return compacted(self, limit, self.entries[-1].start_lsn + 1)

    return [(History, "compacted", bold)]


def _restart_goes_back() -> list[Patch]:
    """Rule 7: the last restart_lsn received is adopted, even a lower one."""
    return [(core, "greatest_restart", lambda _known, received: received)]


def _unbounded_queue() -> list[Patch]:
    """Rule 8: the queue keeps everything that any safekeeper needs."""
    return [(Streaming, "_queue_floor", lambda _self: 0)]


def _laggards_hold_on() -> list[Patch]:
    """Rule 8: the primary keeps WAL for all former members."""
    return [(Streaming, "_release_laggards", lambda _self: [])]


def _laggards_fill_every_disk() -> list[Patch]:
    """Rule 8: a laggard's WAL is released only at `max_laggard_bytes`, even if the disks hold less."""
    return [(Streaming, "_release_on_full_disks", lambda _self: [])]


def _full_and_acknowledged() -> list[Patch]:
    """Rule 8: WAL that did not fit on the disk counts as durable."""
    full = Safekeeper._full

    def boast(self: Safekeeper, event: effects.DiskFull) -> list[effects.Effect]:
        return full(self, replace(event, flush_lsn=self.written_lsn))

    return [(Safekeeper, "_full", boast)]


def _lost_donors_are_waited_for() -> list[Patch]:
    """Catch-up: WAL that a donor no longer holds, or lost with its connection, is requested only once."""
    was_read = CatchUp.was_read

    def wait(
        self: CatchUp, read: ReadCatchUpWal, length: int, log: Streaming
    ) -> list[SendCatchUpWal]:
        result = was_read(self, read, length, log)
        self._receivers[read.peer].reading = not length
        return result

    return [(CatchUp, "was_read", wait)]


def _damage_is_lent() -> list[Patch]:
    """Catch-up: a donor sends a damaged segment."""

    def lend(self: wal.Disk, begin: int, end: int, segment: int) -> list[int]:
        spoilt = [at for bad in self.damaged for at in range(bad, bad + segment)]
        cells = dict.fromkeys(spoilt, wal.BYTES)
        return [cells.get(at, self.cells[at]) for at in range(begin, end)]

    return [(wal.Disk, "lend", lend)]


def _only_the_first_donor_is_asked() -> list[Patch]:
    """Catch-up: a donor that could not send a segment is retried forever."""
    was_read = CatchUp.was_read

    def forget(
        self: CatchUp, read: ReadCatchUpWal, length: int, log: Streaming
    ) -> list[SendCatchUpWal]:
        result = was_read(self, read, length, log)
        self._receivers[read.peer].bad = frozenset()
        return result

    return [(CatchUp, "was_read", forget)]


def _bytes_not_records() -> list[Patch]:
    """Rule 9: a vote reports the last byte, in the middle of a record."""
    aligned = Safekeeper._aligned

    def raw(self: Safekeeper, answer: effects.WalAligned) -> list[effects.Effect]:
        return aligned(self, replace(answer, flush_lsn=self.flush_lsn))

    return [(Safekeeper, "_aligned", raw)]


def _committed_part_stays() -> list[Patch]:
    """Rule 9: commit_lsn stays in a record that another timeline replaces."""
    truncate = Safekeeper._truncate

    def stay(self: Safekeeper, point: int, replaced: int) -> list[effects.Effect]:
        known = self.commit_lsn
        result = truncate(self, point, replaced)
        self.commit_lsn = known
        return result

    return [(Safekeeper, "_truncate", stay)]


def _one_majority() -> list[Patch]:
    """Rule 10: during a change a majority of the new members is enough."""

    def groups(self: configuration.Configuration) -> tuple[frozenset[int], ...]:
        return (self.members if self.new_members is None else self.new_members,)

    return [(configuration.Configuration, "groups", property(groups))]


def _done_too_early() -> list[Patch]:
    """Rule 10: a change is reported as done when it is in force, before any new member has it on disk."""
    use = leader.LeaderState.use

    def hasty(self: leader.LeaderState, wanted: configuration.Configuration) -> list[Any]:
        result = use(self, wanted)
        self.membership.settled = wanted.new_members is None
        return [*result, MembersSettled(wanted)] if self.membership.settled else result

    return [(leader.LeaderState, "use", hasty)]


def _forgotten_rollback() -> list[Patch]:
    """Rule 10: the proposer that detects a rolled-back disk does not record it, and the next one trusts the disk."""

    def forget(self: leader.LeaderState, peer: Any) -> list[Any]:
        known = self.membership.configuration
        self.membership.configuration = replace(
            known, distrusted=known.distrusted | {peer.identity}
        )
        self.streaming.use(self.membership.configuration)
        return identities.distrusted(peer)

    return [(leader.LeaderState, "distrust", forget)]


def _same_identity() -> list[Patch]:
    """Rule 10: a safekeeper that lost its disk keeps its identity."""
    new_disk = safekeeper_host.SafekeeperHost.new_disk

    def again(self: safekeeper_host.SafekeeperHost) -> None:
        before = getattr(self, "identity", None)
        new_disk(self)
        if before is not None:
            self.identity = before
            self.control = effects.ControlState(before)

    return [(safekeeper_host.SafekeeperHost, "new_disk", again)]


def _learned_from_anybody() -> list[Patch]:
    """Rule 10: the greatest version is learned, whichever quorum's it is."""

    def learn(self: membership.Membership, held: configuration.Configuration, _: int) -> None:
        self.configuration = configuration.newest((self.configuration, held))

    never = configuration.Configuration, "is_foreign", lambda _self, _quorum: False
    stamped = configuration.Configuration.stamped

    def stamp(self: configuration.Configuration, term: int, _: int = 0) -> Any:
        return stamped(self, term)

    return [
        never,
        (configuration.Configuration, "stamped", stamp),
        (membership.Membership, "learn", learn),
        (membership.Membership, "proposed", property(lambda self: self.configuration)),
    ]


def _without_id_from_anybody() -> list[Patch]:
    """Rule 10: while the quorum has no id, memberships are learned from non-members."""

    def learn(self: membership.Membership, held: configuration.Configuration, _: int) -> None:
        if held.quorum == self.quorum or not (held.quorum or self.configuration.quorum):
            self.configuration = configuration.newest((self.configuration, held))

    return [(membership.Membership, "learn", learn)]


def _formed_beside() -> list[Patch]:
    """Rule 10: safekeepers that are all empty form a quorum, whatever is recorded."""
    first = quorum_id.first

    def forget(answers: Any, addresses: Any, _: quorum_id.KnownQuorumId) -> Any:
        return first(answers, addresses, quorum_id.KnownQuorumId())

    return [(quorum_id, "first", forget)]


MUTANTS: Mapping[str, Callable[[], list[Patch]]] = {
    "a copy is compared with one voter": _one_voter_compared,
    "a quorum begins below the slot": _begins_below_the_slot,
    "a quorum without a byte waits": _never_begins_again,
    "catch-up: lost donors are waited for": _lost_donors_are_waited_for,
    "catch-up: damage is lent": _damage_is_lent,
    "catch-up: the same donor is asked again": _only_the_first_donor_is_asked,
    "1: VCL from before the vote": _what_the_greeting_knew,
    "2: a vote for an equal term": _equal_terms,
    "2: an epoch that is no term": _next_epoch,
    "2: terms without a bound": _terms_without_a_bound,
    "2: any term is outbid": _any_term_is_outbid,
    "3: no zeros over the tail": _no_truncation,
    "3: the history first": _history_first,
    "4: commits before the epoch": _older_epochs_commit,
    "4: votes are acknowledgements": _votes_are_acks,
    "5: a resumption truncates": _resumption_truncates,
    "5: a rejected proposer goes on": _never_stops,
    "5: ended by one newer timeline": _any_newer_timeline,
    "5: a minority's newer timeline stays": _newer_timelines_stay,
    "5: displaced by a vote alone": _displaced_by_a_vote,
    "5: outvoted for ever": _outvoted_for_ever,
    "5: out of reach, and waited for": _out_of_reach_and_waited_for,
    "6: by position alone": _by_position_alone,
    "6: uncommitted epochs are compacted": _uncommitted_epochs_compacted,
    "7: restart_lsn goes back": _restart_goes_back,
    "8: an unbounded queue": _unbounded_queue,
    "8: laggards hold on": _laggards_hold_on,
    "8: laggards fill every disk": _laggards_fill_every_disk,
    "8: no room, and acknowledged": _full_and_acknowledged,
    "9: bytes, not records": _bytes_not_records,
    "9: the committed part of a record stays": _committed_part_stays,
    "10: one majority for two memberships": _one_majority,
    "10: done before it is on disk": _done_too_early,
    "10: a disk that was rolled back is forgotten": _forgotten_rollback,
    "10: a lost disk under its old identity": _same_identity,
    "10: a membership of any quorum": _learned_from_anybody,
    "10: a membership without an id of anybody": _without_id_from_anybody,
    "10: a quorum formed beside another": _formed_beside,
    "10: ended by strangers": _any_strangers,
}


@contextlib.contextmanager
def mutant(name: str) -> Iterator[None]:
    """The cores with one rule broken."""
    with contextlib.ExitStack() as stack:
        for where, attribute, replacement in MUTANTS[name]():
            stack.enter_context(mock.patch.object(where, attribute, replacement))
        yield
