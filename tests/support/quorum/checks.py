"""The invariants of every simulated run, whatever breaks. Each violation names its invariant. Those of one core alone are
checked by the hosts, with the product's own functions (`invariants.py` beside each core).

- election safety: a term has one leader;
- log safety: two safekeepers that share an election epoch hold the same bytes up to the divergence point of their
histories;
- committed never lost: what was reported as committed (up to the last complete record) is in every later leader's log,
and is what every reader was served;
- its own WAL: a server whose WAL below VCL differs from its voters' never leads;
- nothing goes back: a proposer's commit_lsn and restart_lsn, a safekeeper's term and restart_lsn;
- a new log begins with WAL that its server's slot keeps;
- a minority ends no proposer: one whose timeline is refused ends only when no quorum is left that may vote for it;
- a lone proposer is not displaced: only one that ran concurrently with another may end because of it;
- bounded: the queue, what is under way to a safekeeper, and the WAL that the primary must keep.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from walsender_bridge.quorum.proposer.effects import StopReason
from walsender_bridge.quorum.protocol.history import divergence
from walsender_bridge.quorum.protocol.messages import NodeId
from walsender_bridge.quorum.safekeeper.effects import ControlState

if TYPE_CHECKING:
    from tests.support.quorum.proposer_host import ProposerHost
    from tests.support.quorum.safekeeper_host import SafekeeperHost
    from tests.support.quorum.world import World
    from walsender_bridge.quorum.proposer.replication import Streaming


class Checks:
    def __init__(self, world: World) -> None:
        self.world = world
        self.leaders: dict[int, NodeId] = {}
        #: The committed log: the cell at each LSN, its end, and its end in each term.
        self.cells: dict[int, int] = {}
        self.end = 0
        self.ends: dict[int, int] = {}
        #: The terms in which proposers were rejected, by their UUID.
        self.refused: dict[int, int] = {}
        self.leading: set[int] = set()

    # -- proposers ----------------------------------------------------------------------------------

    def streams(self, host: ProposerHost, streaming: Streaming) -> None:
        """Called after every event of a leader."""
        if host.is_elsewhere:
            return
        identity = host.core.node_id.proposer
        if identity not in self.leading:
            self.leading.add(identity)
            self._took_lead(host, streaming)

    def streamed(self, streaming: Streaming) -> None:
        """WAL arrived: a safekeeper that is too far behind no longer holds back its removal."""
        if streaming.established:
            held = streaming.end - streaming.restart_lsn
            uncommitted = streaming.end - streaming.commit_lsn
            bound = max(streaming.limits.max_laggard_bytes, uncommitted)
            assert held <= bound, "bounded: the primary's WAL"

    def _took_lead(self, host: ProposerHost, streaming: Streaming) -> None:
        node_id = host.core.node_id
        other = self.leaders.setdefault(node_id.term, node_id)
        assert other == node_id, f"election safety: {other} and {node_id}"
        vcl = streaming.epoch_start
        # A slow one may be elected after a newer one, whose commits it cannot know.
        end = max([0, *(end for term, end in self.ends.items() if term < node_id.term)])
        assert vcl >= end, f"committed never lost: {end}, and {node_id} starts at {vcl}"
        best, kept = host.core.best, host.core.primary_begin or 0
        assert best is not None
        size = host.core.server.segment_size
        assert best.history or vcl >= kept - kept % size, f"a new log begins at {vcl}, kept: {kept}"
        self._goes_on(host)
        if host.server in self.world.clones:
            host.kill()  # no voter holds anything that identifies the copy: its operator notices
        for safekeeper in self.world.safekeepers:
            core = safekeeper.core
            if (
                safekeeper.up
                and core.control.node_id == node_id
                and best.history
                and core.control.history == best.history
                and core.aligned is not None
                and core.aligned.flush_lsn == best.flush_lsn
            ):
                self._agrees(safekeeper.disk.cells, safekeeper.disk.base, end, "leader's log")
        self.world.happened["elected"] += 1

    def _goes_on(self, host: ProposerHost) -> None:
        """The server of a new leader has the WAL that its voters hold below VCL, as far as bytes are compared."""
        core, server = host.core, host.server
        best, vcl = core.best, core.vcl
        assert best is not None
        if server is None or not best.history or best.history.entries[0].start_lsn >= vcl:
            return
        floor = max(vcl - core.limits.compare_bytes, best.history.timeline_start(vcl - 1))
        # The proposer does not wait for more voters than the quorum needs.
        heard = {peer.identity for peer in core.peers.values() if peer.reply}
        for voter in self.world.safekeepers:
            voted = voter.up and voter.control.node_id == core.node_id
            if not voted or voter.core.aligned is None or voter.identity not in heard:
                continue
            end = divergence(voter.control.history, voter.core.aligned.flush_lsn, best.history, vcl)
            for at in range(max(voter.disk.base, floor), end or 0):
                same = voter.disk.cells.get(at) == server.cells.get(at)
                assert same, f"another server's WAL: {at} at {voter.number}, VCL is {vcl}"

    def committed(self, host: ProposerHost, lsn: int) -> None:
        """A proposer reports to its primary that a quorum has everything below `lsn`."""
        if host.is_elsewhere:
            return
        assert lsn >= host.commit_lsn, "nothing goes back: commit_lsn"
        streaming = host.core.streaming
        assert streaming is not None
        cells = self._log(host, lsn)
        if cells:
            base = min(cells)
            aligned = self.world.records.aligned(cells, base, lsn)
            self._agrees(cells, base, aligned, f"commit of {host.core.node_id}")
            for at in range(max(self.end, base), aligned):
                self.cells[at] = cells[at]
            if aligned > self.end:
                self.world.happened["commits"] += 1
            self.end = max(self.end, aligned)
            self.ends[host.core.node_id.term] = aligned

    def _log(self, host: ProposerHost, lsn: int) -> dict[int, int]:
        """The log of a safekeeper in this election epoch that has it up to `lsn`."""
        for safekeeper in self.world.own_safekeepers:
            core = safekeeper.core
            history = safekeeper.control.history
            if history.latest_election_epoch == host.core.node_id.term and core.flush_lsn >= lsn:
                return {at: c for at, c in safekeeper.disk.cells.items() if at < lsn}
        # The safekeepers that acknowledged it have crashed since.
        return {at: c for at, c in host.server.cells.items() if at < lsn} if host.server else {}

    def quorum_log(self, host: ProposerHost) -> dict[int, int]:
        """The whole log up to VCL, as a failover's standby gets it from the safekeepers."""
        vcl = host.core.vcl
        cells = dict(self.cells)
        cells.update(self._log(host, vcl))
        first = min(self.world.server.cells)
        own = self.world.server.cells
        cells.update((at, own[at]) for at in range(first, max(first, min(cells, default=vcl))))
        return {at: cell for at, cell in cells.items() if at < vcl}

    def restarted(self, host: ProposerHost, lsn: int) -> None:
        if host.is_elsewhere:
            return
        assert lsn >= host.restart_lsn, "nothing goes back: the proposer's restart_lsn"
        host.restart_lsn = lsn

    def stopped(self, host: ProposerHost, reason: StopReason, detail: str) -> None:
        if host.is_elsewhere:
            return
        assert reason not in {StopReason.BROKEN, StopReason.OTHER_SERVER}, (reason, detail)
        if reason == StopReason.OTHER_QUORUM:
            core = host.core
            here = {peer.identity for peer in core.peers.values() if peer.greeting}
            followed = core.leader is not None or core.configuration.has_quorum(here)
            assert not followed, f"strangers ended a proposer that has a quorum: {detail}"
        # Without a server no timelines can differ from the log's.
        assert host.server is not None or "this server" not in detail, f"a failover: {detail}"
        # Unless another standby was promoted meanwhile: then this one was left behind.
        wanted = host.of_failover and host.server is self.world.server
        assert not (wanted and reason == StopReason.OTHER_HISTORY), "refused after a failover"
        if reason == StopReason.FENCED or (
            reason == StopReason.OTHER_HISTORY and "was left for" in detail
        ):
            members = host.core.configuration
            willing = members.everyone - host.withheld
            assert not members.has_quorum(willing), f"a minority's timeline ended it: {detail}"
        if reason == StopReason.DISPLACED:
            assert host.had_rivals, f"a lone proposer was displaced: {detail}"
            self.refused[host.core.node_id.proposer] = host.core.node_id.term

    # -- safekeepers --------------------------------------------------------------------------------

    def persisted(self, host: SafekeeperHost, before: ControlState, after: ControlState) -> None:
        assert after.node_id.term < 1 << 63, "there is always a term above"
        if after.node_id != before.node_id:
            rejected = self.refused.get(after.node_id.proposer, after.node_id.term)
            assert after.node_id.term <= rejected, "a rejected proposer elected itself again"

    def served(self, host: SafekeeperHost, lsn: int) -> None:
        """Readers get this: only what is committed, and the same everywhere."""
        if host.foreign:
            return
        disk = host.disk
        aligned = self.world.records.aligned(disk.cells, disk.base, lsn)
        if disk.cells and lsn:
            assert aligned <= max(self.end, disk.base), f"a reader gets {aligned} of {self.end}"
            self._agrees(disk.cells, disk.base, aligned, "what a reader gets")
            # The rest of an incomplete record is of the committed log, too.
            held = [self.cells.get(at) for at in range(aligned, lsn)]
            rest = [disk.cells.get(at) for at in range(aligned, lsn)]
            assert all(h is None or h == r for h, r in zip(held, rest, strict=True))

    def _agrees(self, cells: dict[int, int], base: int, end: int, what: str) -> None:
        for at in range(max(base, self.end - 200), min(end, self.end)):
            known = self.cells.get(at)
            assert known is None or known == cells.get(at), (
                f"committed never lost: {at} in the {what}"
            )

    # -- all logs -----------------------------------------------------------------------------------

    def logs(self) -> None:
        """Any two logs are equal up to the divergence point of their histories."""
        for one, two in combinations(self.world.own_safekeepers, 2):
            if not one.control.history or not two.control.history or not (one.up and two.up):
                continue
            ends = one.core.flush_lsn, two.core.flush_lsn
            point = divergence(one.control.history, ends[0], two.control.history, ends[1])
            first = max(one.disk.base, two.disk.base)
            for at in range(max(first, (point or 0) - 200), point or 0):
                if one.disk.cells.get(at) != two.disk.cells.get(at):
                    held = [each.disk.cells.get(at) for each in (one, two)]
                    raise AssertionError(
                        f"log safety: {held} at {at} of {one.number}, {two.number}"
                    )

    def _old_wal_is_equal(self) -> None:
        """WAL received by catch-up is the committed WAL, however old."""
        # One that is no member, or that waits for an operator, may hold the end of another timeline.
        members = [
            each
            for each in self.world.safekeepers
            if self.world.is_member(each) and each.core.taken
        ]
        for one, two in combinations(members, 2):
            end = min(self.end, one.core.flush_lsn, two.core.flush_lsn)
            for at in range(max(one.disk.base, two.disk.base), end):
                held = [each.disk.cells.get(at) for each in (one, two)]
                assert held[0] == held[1], f"log safety: {held} at {at}, older"

    def settled(self) -> None:
        """After the faults the cluster works: the server's last byte gets committed."""
        proposer, server = self.world.proposer, self.world.server
        assert proposer.leads, "no proposer was elected in the end"
        assert proposer.commit_lsn == server.flush_lsn, "it does not commit in the end"
        assert not self.world.lack_catch_up(), "catch-up is not complete in the end"
        if self.world.faults.keep is not None:
            self._old_wal_is_equal()
        for safekeeper in self.world.safekeepers:
            if self.world.is_member(safekeeper):
                voted = safekeeper.control.node_id
                assert voted == proposer.core.node_id, f"a member stays with {voted} in the end"
                held = safekeeper.control.configuration.quorum
                assert held == self.world.quorum, f"a member is of quorum {held} in the end"
