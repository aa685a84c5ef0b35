"""Failovers on the virtual clock: the real steps (`plan.next_step`), killed between any two and started again.

Besides log safety two invariants must hold. **The fence**: once a failover was elected, no proposer is elected for the
timeline that it fenced, or an older one, unless a failover was aborted since. **No refusal**: the server that the steps
promoted is never refused for its history, unless another one was promoted, or the failover aborted, meanwhile.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tests.support.quorum.checks import Checks
from tests.support.quorum.proposer_host import ProposerHost
from tests.support.quorum.wal import Server
from tests.support.quorum.world import Faults, World
from walsender_bridge.errors import TusklineError
from walsender_bridge.quorum.failover.invariants import check_invariants
from walsender_bridge.quorum.failover.plan import (
    FailoverQuorum,
    FailoverStep,
    PromotionCandidate,
    next_step,
)
from walsender_bridge.quorum.proposer.effects import Lineage
from walsender_bridge.quorum.protocol.messages import Purpose

if TYPE_CHECKING:
    from walsender_bridge.quorum.proposer.replication import Streaming

FAILOVERS = Faults(
    {
        "break": 4,
        "crash": 5,
        "proposer": 3,
        "server": 1,
        "zombie": 5,
        "promote": 1,
        "failover": 8,
        "abort": 1,
    },
    every=25.0,
    crash_at_election=0.03,
)


class FailoverChecks(Checks):
    def __init__(self, world: FailoverWorld) -> None:
        super().__init__(world)
        #: Each failover that a quorum followed: (term, fenced timeline).
        self.fences: set[tuple[int, int]] = set()
        self.aborts: list[ProposerHost] = []

    def streams(self, host: ProposerHost, streaming: Streaming) -> None:
        super().streams(host, streaming)
        fence = host.core.node_id.term, streaming.history.entries[-1].timeline
        if streaming.established and host.core.purpose == Purpose.FAILOVER:
            self.fences.add(fence)

    def _took_lead(self, host: ProposerHost, streaming: Streaming) -> None:
        super()._took_lead(host, streaming)
        term, purpose = host.core.node_id.term, host.core.purpose
        if purpose != Purpose.ATTACH or host.server is None:
            return
        for fenced_in, timeline in self.fences:
            if host.server.timeline <= timeline and term > fenced_in:
                taken_back = any(abort.core.node_id.term > fenced_in for abort in self.aborts)
                assert taken_back, f"the fence of term {fenced_in} did not hold {host.core.node_id}"


class Standby:
    """A standby of `server`: it has some part of its WAL, and more of it at each probe."""

    def __init__(self, world: FailoverWorld, server: Server) -> None:
        self.world = world
        self.origin = server
        first = max([server.begin, *(switch.lsn for switch in server.switches)])
        end = world.choose.randint(max(first, server.flush_lsn - 60), server.flush_lsn)
        self.server = self._holding({at: c for at, c in server.cells.items() if at < end})
        self.in_recovery, self.guarded, self.follows, self.replayed = True, False, False, 0

    def _holding(self, cells: dict[int, int]) -> Server:
        origin = self.origin
        return Server(
            origin.records, origin.choose, origin.begin, origin.timeline, origin.switches, cells
        )

    def probe(self) -> PromotionCandidate:
        server, origin = self.server, self.origin
        if self.in_recovery and not self.follows and self.world.choose.random() < 0.2:
            self.server = server = self._holding(
                {at: c for at, c in origin.cells.items() if at < origin.flush_lsn}
            )
        lineage = Lineage(server.timeline, server.switches)
        return PromotionCandidate(
            self.in_recovery,
            lineage,
            server.flush_lsn,
            self.replayed,
            guarded=self.guarded,
            follows=self.follows,
        )

    def receive(self, cells: dict[int, int]) -> None:
        """From a safekeeper: all up to VCL."""
        self.server = self._holding(cells)

    def promote(self) -> None:
        server = self.server
        self.server = server.promoted(server.cells, server.flush_lsn, self.world._timeline())
        self.in_recovery = False
        self.world.servers.append(self.server)


class FailoverHost:
    """One run of the failover, until it is done, fails, or is killed: then another one follows."""

    def __init__(self, world: FailoverWorld, standby: Standby) -> None:
        self.world = world
        self.standby = standby
        self.leader: ProposerHost | None = None
        self.waiting: FailoverStep | None = None
        self.quorum = FailoverQuorum(standby.origin.timeline)
        self.alive = True
        self._later()

    def _later(self) -> None:
        self.world.at(self.world.choose.uniform(1, 15), self._turn)

    def end(self) -> None:
        self.alive = False
        if self.leader is not None and self.leader is not self.world.proposer:
            self.leader.kill()

    def _turn(self) -> None:
        world = self.world
        if not self.alive:
            return
        if not world.calm and world.choose.random() < 0.05:
            world.happened["failover killed"] += 1
            self.end()
            world.again(self.standby)
            return
        leader = self.leader
        if self.waiting is None:
            try:
                candidate = self.standby.probe()
                step = next_step(candidate, self.quorum)
                check_invariants(step, candidate, self.quorum)
            except TusklineError as error:
                world.happened[f"failover: {type(error).__name__}"] += 1
                self.end()
                return
            self._perform(step)
        elif leader is not None and not leader.alive:
            self.end()
            if world.choose.random() < 0.7:
                world.again(self.standby)
            return
        elif self._reached():
            self.waiting = None
        if self.alive:
            self._later()

    def _perform(self, step: FailoverStep) -> None:
        standby, world = self.standby, self.world
        world.happened[f"failover {step.name}"] += 1
        match step:
            case FailoverStep.ELECT:
                self._enter(None, step)
            case FailoverStep.COMMIT:
                self._enter(standby.server, step)
            case FailoverStep.GUARD:
                standby.guarded = True
            case FailoverStep.COMPARE:
                self._compare()
            case FailoverStep.FOLLOW:
                standby.follows = True
            case FailoverStep.RECEIVE:
                assert self.leader is not None
                if not self.leader.alive:
                    self.end()  # displaced: another election may have changed the safekeepers by now
                    return
                standby.receive(self._log(self.leader))
            case FailoverStep.REPLAY:
                standby.replayed = standby.server.flush_lsn
            case FailoverStep.PROMOTE:
                assert self.leader is not None
                if not self.leader.alive:
                    self.end()
                    return
                standby.promote()
            case FailoverStep.ATTACH:
                self._attach()
            case FailoverStep.DONE:
                self.end()

    def _enter(self, source: Server | None, step: FailoverStep) -> None:
        if self.leader is not None:
            self.leader.kill()
        self.leader = self.world.start_proposer(source, Purpose.FAILOVER)
        self.waiting = step

    def _reached(self) -> bool:
        leader, standby = self.leader, self.standby
        assert leader is not None
        if not leader.leads:
            return False
        core = leader.core
        timeline = core.history.timeline_at(core.vcl)
        if self.waiting == FailoverStep.ELECT:
            self.quorum = FailoverQuorum(timeline, timeline, core.vcl)
        elif self.waiting == FailoverStep.COMMIT:
            end = standby.server.flush_lsn
            if leader.commit_lsn < end:
                return False
            self.quorum = replace(self.quorum, vcl=core.vcl, committed=end)
        else:
            self.quorum = FailoverQuorum(standby.server.timeline)
        return True

    def _log(self, leader: ProposerHost) -> dict[int, int]:
        """The quorum's log up to VCL; WAL that no safekeeper holds any more is the standby's."""
        vcl, checks = leader.core.vcl, self.world.checks
        cells = checks.cells | checks._log(leader, vcl)
        first = min(cells, default=vcl)
        own = {at: cell for at, cell in self.standby.server.cells.items() if at < first}
        return own | {at: cell for at, cell in cells.items() if at < vcl}

    def _compare(self) -> None:
        assert self.leader is not None
        assert self.quorum.vcl is not None
        end = min(self.quorum.vcl, self.standby.server.flush_lsn)
        if not self.leader.alive:
            self.end()  # displaced: the safekeepers may hold other WAL by now
            return
        theirs, own = self._log(self.leader), self.standby.server.cells
        if end not in theirs and end < self.quorum.vcl:
            self.world.happened["failover: no safekeeper has what the standby lacks"] += 1
            self.end()
            return
        if any(theirs.get(at) != own.get(at) for at in range(max(0, end - 8), end)):
            self.world.happened["failover: a copy"] += 1
            self.end()
            return
        self.quorum = replace(self.quorum, equal_to=end)

    def _attach(self) -> None:
        world, server = self.world, self.standby.server
        if self.leader is not None:
            self.leader.kill()
        previous, world.server = world.proposer, server
        if world.choose.random() < 0.5:
            previous.kill()
        world.proposer = self.leader = world.start_proposer(server)
        world.proposer.of_failover = world.undisturbed
        self.waiting = FailoverStep.ATTACH


class FailoverWorld(World):
    """A world in which the operator fails over, one standby at a time."""

    checks: FailoverChecks

    def __init__(self, seed: int, size: int = 3, faults: Faults = FAILOVERS) -> None:
        super().__init__(seed, size, faults)
        self.checks = FailoverChecks(self)
        self.failover: FailoverHost | None = None
        #: No other promotion or abort happened since the current failover began.
        self.undisturbed = True

    def start_proposer(
        self, server: Server | None, purpose: Purpose = Purpose.ATTACH, above: int = 0
    ) -> ProposerHost:
        host = super().start_proposer(server, purpose, above)
        if purpose == Purpose.ABORT:
            self.checks.aborts.append(host)
            self.undisturbed = False
        return host

    def again(self, standby: Standby) -> None:
        previous = self.failover

        def start() -> None:
            # Unless another failover has begun meanwhile, with another standby: it replaces this one.
            if self.failover is previous and (previous is None or not previous.alive):
                self.failover = FailoverHost(self, standby)

        self.at(self.choose.uniform(1, 30), start)

    def _fault_failover(self) -> None:
        if self.failover is None or not self.failover.alive:
            self.undisturbed = True
            self.failover = FailoverHost(self, Standby(self, self.server))

    def _fault_promote(self) -> None:
        """Promote the standby without these steps, wherever it is."""
        self.undisturbed = False
        super()._fault_promote()

    def _fault_abort(self) -> None:
        if self.failover is not None:
            self.failover.end()
        self.proposer.kill()
        self.proposer = self.start_proposer(self.server, Purpose.ABORT)

    def finish(self) -> None:
        """The current failover is abandoned; the operator aborts it if no proposer leads."""
        if self.failover is not None:
            self.failover.end()
        super().finish()
