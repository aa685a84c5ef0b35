"""The world of `log_world.py`, in which the repository's records are lost as well, and rebuilt from the replicas.

The lost repository may be alive elsewhere: it goes on to issue versions, commit and seal, as far as the machines and their
reports let it, also between any two steps of the rebuild. A machine may be away meanwhile, and return with a commit that
nobody else has. Barriers force versions, which readers see before any machine knows them.

A rebuild ends in its middle: a machine crashes, a synchronization breaks off, the store cannot be written. The next attempt may
give up another machine.

What is checked beside the invariants: what a reader has seen. A version has one end; the newest that can be read, and its
end, never go back. What attempts have left keeps no later one from being completed, and no replica is ahead of the repository
that one has built.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tests.support.etcd_model import EtcdModel
from tests.support.log_world import LEAST, LOG, STREAM, Machine, Violation, World
from walsender_bridge.change_log.protocol import (
    MAX_COUNT,
    ReplicaReport,
    is_from_before_a_rebuild,
)
from walsender_bridge.change_log.replica.core import Replica, ReplicaState
from walsender_bridge.change_log.replica.disk import IndexRow
from walsender_bridge.change_log.replica.synchronization import source_of
from walsender_bridge.change_log.repository import invariants as of_repository
from walsender_bridge.change_log.repository import rebuild
from walsender_bridge.change_log.repository.core import (
    Repository,
    RepositoryTick,
    StreamSealed,
    TrimDecided,
)
from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.change_log.repository.rebuild import (
    AskedLogServer,
    Offer,
    RebuildPlan,
    StreamHistory,
    StreamPlan,
)
from walsender_bridge.errors import TusklineError, UnavailableError


class RebuiltWorld(World):
    """See the module."""

    EVENTS = (*World.EVENTS, ("force", 2), ("lose_repository", 0.6), ("elsewhere", 5))
    #: Attempts to rebuild, between which machines that are down start again.
    ATTEMPTS = 20
    #: How often a rebuild ends behind the last fence, since the store cannot be written.
    NOT_WRITTEN = 0.2

    def __init__(self, seed: int, names: str = "klm") -> None:
        #: What the present records begin with; None: nothing.
        self.base: Repository | None = None
        #: The repository that was taken for lost, while it goes on.
        self.away: Repository | None = None
        #: What is reported to that one, and the last report of each machine.
        self.reports_away: list[ReplicaReport] = []
        self.shown_away: dict[str, ReplicaReport] = {}
        #: The last term that it could give out.
        self.given_away: int | None = None
        #: What readers have seen: the end of the stream by version; the newest version; the greatest end.
        self.ends: dict[int, int] = {}
        self.seen = self.seen_end = 0
        #: Whether nothing disturbs a rebuild.
        self.calm = False
        #: Whether the former repository goes on behind a fence that it does not know.
        self.spoilt = False
        super().__init__(seed, names)

    def first_state(self) -> Repository:
        return Repository() if self.base is None else copy.deepcopy(self.base)

    def restart_repository(self) -> None:
        """What was reported to the process that has ended reaches no other one."""
        super().restart_repository()
        self.reports.clear()

    # -- readers ------------------------------------------------------------------------------------

    def force(self) -> None:
        """A barrier that asks for nothing: a version that is published at once, and sent later."""
        self.record(RepositoryTick(0.0, (), ({},)))

    def read(self, repository: Repository) -> None:
        """A reader asks for the newest version, and where it ends the stream."""
        version = repository.published
        at = repository.streams[STREAM].at(version)
        assert at is not None
        known = self.ends.setdefault(version, at.context.end)
        if known != at.context.end:
            raise Violation(f"version {version} ended at {known}, and now at {at.context.end}")
        self.seen, self.seen_end = max(self.seen, version), max(self.seen_end, known)

    def check(self) -> None:
        super().check()
        its = self.repository
        at = its.streams[STREAM].at(its.published)
        assert at is not None
        if its.published < self.seen or at.context.end < self.seen_end:
            raise Violation(
                f"version {self.seen} and offset {self.seen_end} were read, and now version {its.published} and offset"
                f" {at.context.end}"
            )
        self.read(its)
        for name, machine in self.machines.items():
            core = machine.core
            if core is None or self.spoilt:
                continue
            if core.current.version > its.version:
                raise Violation(f"{name} is ahead of the repository, which issues no version")

    def serves(self, machine: Machine) -> bool:
        """One that missed the rebuild is no member, and is wiped before it becomes one."""
        core = machine.core
        missed = core is not None and is_from_before_a_rebuild(
            core.current.version, self.repository.version
        )
        return machine.up and not missed

    # -- the lost repository, elsewhere -------------------------------------------------------------

    def hear(self, name: str, found: ReplicaReport) -> None:
        """Each repository asks for reports of its own."""
        super().hear(name, found)
        if self.away is not None:
            self.shown_away[name] = found
            self.reports_away.append(found)

    def elsewhere(self) -> None:
        """It goes on by what it knows, until it hears of a version that it never issued."""
        its = self.away
        if its is None:
            return
        reports = tuple(self.choose.sample(self.reports_away, min(len(self.reports_away), 6)))
        if any(each.ahead for each in its.evaluate(reports)):
            self.away = None
            self.happened["the old repository stops"] += 1
            return
        if self.choose.random() < 0.8:
            self.reports_away.clear()
        if self.given_away is not None and self._is_rebuilt_since(its):
            self._write_elsewhere(its, self.given_away)
        if self.choose.random() < 0.1:
            self._trim_elsewhere(its)
        if self.choose.random() < 0.4:
            self._seal_elsewhere(its)
            return
        its.apply(RepositoryTick(0.0, reports, ({},) if self.choose.random() < 0.3 else ()))
        self.read(its)
        stream = its.streams[STREAM]
        for each in reports:
            if each.replica in stream.members and (missed := tuple(stream.missed(each.version))):
                self.send(partial(self.commit, each.replica, missed))

    def _seal_elsewhere(self, its: Repository) -> None:
        stream = its.streams[STREAM]
        end, term = stream.last.context.end, its.next_term(STREAM, self.shown_away.values())
        its.apply(StreamSealed(STREAM, term))
        calls = {
            name: partial(self.seal_late, name, end, term, its.version) for name in stream.members
        }
        if self.choose.random() < 0.5:
            for call in calls.values():
                self.send(call)
            return
        sealed = [
            name
            for name, call in calls.items()
            if name in self.machines and self.machines[name].up and self.attempt(call)
        ]
        if len(sealed) < LEAST:
            return
        self.given_away = term
        if self.base is not None and self._is_rebuilt_since(its):
            raise Violation("the old repository can give the stream to another writer")

    def _trim_elsewhere(self, its: Repository) -> None:
        name = self.choose.choice(its.streams[STREAM].members)
        if name in self.machines and (at := self.trim_point(its, name)):
            its.apply(TrimDecided(STREAM, at, 0.0))
            self.truth.low = max(self.truth.low, at)
            self.send(partial(self.trim_one, name, at, its.version))

    def _write_elsewhere(self, its: Repository, term: int) -> None:
        """A writer with a term that it gave out before comes late. What is in front of the fence is wiped before it is a member."""
        present = [name for name, machine in self.machines.items() if self.serves(machine)]
        opened = [
            name
            for name in its.streams[STREAM].members
            if name in present
            and self.attempt(
                partial(self.machines[name].do, partial(Replica.open_writer, term=term))
            )
        ]
        if opened:
            raise Violation(f"a writer of the old repository opens {opened} behind the rebuild")

    def _is_rebuilt_since(self, its: Repository) -> bool:
        return is_from_before_a_rebuild(its.version, self.repository.version)

    # -- the rebuild --------------------------------------------------------------------------------

    def lose_repository(self) -> None:
        """Its disk is gone. If too few replicas are left to rebuild it, that is none of ours: then it was not."""
        self.faults += 1
        self.seal = self.given = None
        self.syncs = {}
        former = copy.deepcopy(self.repository) if self.choose.random() < 0.5 else None
        self.away, self.given_away = former, None
        self.reports_away, self.shown_away = [*self.reports], {**self.shown}
        self.reports.clear()
        self.shown = {}
        attempts, end = 0, self.stream.last.context.end
        while attempts < self.ATTEMPTS or (attempts < 30 and self._is_spoilt(former, end)):
            attempts += 1
            given_up = self._given_up()
            possible = self._is_possible(given_up)
            try:
                self._rebuild(given_up)
            except TusklineError:
                self.happened["refused to rebuild"] += 1
                if possible and self.choose.random() < 0.25:
                    self._complete(given_up)
                    return
                self._meanwhile()
                self.restart()
            else:
                self.happened["rebuilt"] += 1
                return
        if self._is_spoilt(former, end) and self._is_possible(()):
            # The former repository is not started again behind an attempt: docs/log-lost.md.
            self._complete(())
            return
        self.away = None
        self.spoilt |= self._is_spoilt(former, end)
        self.happened["given up"] += 1
        if former is None:
            self.restart_repository()
        else:
            self.base = former
            self._begin()

    def _is_possible(self, given_up: Sequence[str]) -> bool:
        """Whether it can be rebuilt once all other machines answer."""
        try:
            self._plan([name for name in self.machines if name not in given_up], given_up)
        except TusklineError:
            return False
        return True

    def _complete(self, given_up: Sequence[str]) -> None:
        """The same command again, and nothing disturbs it: what was possible is possible, whatever the attempt before has left."""
        self.restart()
        self.calm = True
        try:
            self._rebuild(given_up)
        except TusklineError as error:
            raise Violation(f"31: a rebuild cannot be repeated: {error}") from error
        finally:
            self.calm = False
        self.happened["rebuilt"] += 1

    def _is_spoilt(self, former: Repository | None, end: int) -> bool:
        """Whether the stream cannot go on under the former repository, so that the operator has to complete the rebuild.

        Some machine knows a fence; or a commit was recorded, also meanwhile, that a seal of the rebuild may have removed.
        """
        known = self.repository if former is None else former
        stream = known.streams[STREAM]
        cores = [core for each in self.machines.values() if (core := each.core) is not None]
        fenced = any(is_from_before_a_rebuild(known.version, c.current.version) for c in cores)
        members = [m for n in stream.members if (m := self.machines.get(n)) is not None]
        ends = [m.core.current.committed_end for m in members if m.core is not None]
        return fenced or stream.last.context.end > min([end, *ends])

    def _meanwhile(self) -> None:
        """Late messages arrive, the old repository goes on by what it hears, and a machine may crash."""
        if self.calm:
            return
        if self.choose.random() < 0.02:
            self.crash()
        for _ in range(self.choose.randrange(6)):
            self.deliver()
            if self.choose.random() < 0.5:
                self.report()
            if self.choose.random() < 0.6:
                self.elsewhere()

    def _rebuild(self, given_up: Sequence[str]) -> None:
        asked = [n for n, each in self.machines.items() if each.up and n not in given_up]
        plan, offers = self._plan(asked, given_up)
        (stream,) = plan.streams
        rows = self._rows(stream)
        rebuild.check_history(STREAM, [o for o in offers if o.log_server in stream.behind], rows)
        for name in (*stream.members, *stream.behind):
            self._meanwhile()
            self._seal_for(stream, name, plan.fence)
        members = self._members(plan, stream)
        for name in members:
            self._meanwhile()
            self._may_end(0.1)
            fence = plan.fence_of(stream)
            self._answers(name).do(partial(Replica.commit, context=fence))
            self._seal_for(stream, name, plan.fence)
        cores = [core for name in members if (core := self.machines[name].core) is not None]
        statuses = [core.status() for core in cores]
        rebuild.check_sealed(plan, stream, statuses)
        self._may_end(self.NOT_WRITTEN)
        low = max(each.low_offset for each in statuses)
        history = StreamHistory(members, rows, cores[0].current.position, low)
        self._begin_with(plan, history, asked)

    def _given_up(self) -> list[str]:
        """Two are too many: that has to be refused."""
        names = sorted(self.machines)
        given_up = self.choose.sample(names, self.choose.choice((0, 0, 1, 1, 1, 2)))
        if len(given_up) == 1 and self.choose.random() < 0.6:
            # Often the one that alone has applied the last commit, or knows a fence.
            known = self.choose.choice((self._committed_end, self._committed_end, self._version))
            given_up = [max(names, key=known)]
        return given_up

    def _may_end(self, chance: float) -> None:
        """The command may end here, also since the store cannot be written."""
        if not self.calm and self.choose.random() < chance:
            raise UnavailableError("the command ends")

    def _plan(
        self, asked: Sequence[str], given_up: Sequence[str] = ()
    ) -> tuple[RebuildPlan, list[Offer]]:
        names = sorted(self.machines)
        servers = [AskedLogServer(n, n if n in asked else "", n in given_up) for n in names]
        offers = [offer for n in names if n in asked and (offer := self._offer_of(n)) is not None]
        return rebuild.plan(servers, offers, ReplicationPolicy(3, LEAST)), offers

    def _answers(self, name: str) -> Machine:
        machine = self.machines[name]
        if not machine.up:
            raise UnavailableError(f"{name} does not answer")
        return machine

    def _committed_end(self, name: str) -> int:
        core = self.machines[name].core
        return 0 if core is None else core.current.committed_end

    def _version(self, name: str) -> int:
        core = self.machines[name].core
        return 0 if core is None else core.current.version

    def _offer_of(self, name: str) -> Offer | None:
        machine = self.machines[name]
        core = machine.core
        if core is None:
            return None
        reason = core.reason or "learning" if core.state == ReplicaState.LEARNING else ""
        source = source_of(core.synchronization)
        if core.current.replaced_by:
            # As `Rebuilder._offer`.
            reason, source = reason or rebuild.REPLACED, ""
        now, rows = core.current, machine.disk.rows
        return Offer(
            name,
            STREAM,
            LOG,
            reason,
            term=now.term,
            low_offset=now.low_offset,
            committed_end=now.committed_end,
            context=now.context,
            bytes_total=now.position.bytes_total,
            last=rows[-1] if rows and now.low_offset < now.committed_end else None,
            source=source,
        )

    def _rows(self, stream: StreamPlan) -> Sequence[IndexRow]:
        rows = self.machines[stream.source].disk.rows
        return [row for row in rows if stream.low_offset < row.context.end <= stream.end]

    def _seal_for(self, stream: StreamPlan, name: str, version: int) -> None:
        machine = self._answers(name)
        machine.do(partial(Replica.seal, end=stream.end, term=stream.term, version=version))
        machine.session += 1

    def _members(self, plan: RebuildPlan, stream: StreamPlan) -> tuple[str, ...]:
        members = [*stream.members]
        for name in stream.to_synchronize:
            if name in stream.near or len(members) < plan.least:
                self._meanwhile()
                if name in stream.learning:
                    old = replace(stream, end=MAX_COUNT)
                    self.attempt(partial(self._seal_for, old, name, plan.fence))
                if self.attempt(partial(self._synchronize, stream.source, name)):
                    members.append(name)
        if len(members) < plan.least:
            raise UnavailableError("too few replicas are in sync")
        return tuple(members)

    def _synchronize(self, source: str, name: str) -> None:
        """It may break off between any two batches; what has been taken stays."""
        label, batches = self.sync_init(self._answers(source), self._answers(name)) or ("", [])
        if not batches:
            raise UnavailableError("the synchronization is refused")
        for batch in batches:
            self._meanwhile()
            if not self.calm and self.choose.random() < 0.3:
                raise UnavailableError("the connection broke")
            its = partial(Replica.sync_replicate, source=label, batch=batch)
            self._answers(name).do(its)

    def _begin_with(self, plan: RebuildPlan, history: StreamHistory, asked: Sequence[str]) -> None:
        """The new store, whose records begin here. What the rebuild dropped is not to be seen again."""
        state = rebuild.rebuilt(
            plan,
            {STREAM: history},
            {name: name for name in asked},
            replicas=3,
            now=0.0,
            hold=self.choose.choice((0.0, 0.0, 0.0, 1.0)),
        )
        of_repository.check_invariants(state, of_repository.checked(state))
        self.base = Repository.from_record(state.to_record())
        self._begin()
        self.spoilt = False
        end = self.stream.last.context.end
        kept = {o: entry for o, entry in self.truth.committed.items() if o < end}
        self.truth.committed = kept
        held = {
            data
            for name in history.members
            for offset, data in self.machines[name].disk.entries.items()
            if offset < end
        }
        self.truth.rejected |= self.truth.written - held - {data for data, _ in kept.values()}

    def _begin(self) -> None:
        """A store that begins with `base`."""
        self.etcd = EtcdModel()
        self.fence, self.number = self.etcd.lead(), 0
        self.repository = self.first_state()

    def finish(self) -> None:
        self.away = None
        super().finish()
