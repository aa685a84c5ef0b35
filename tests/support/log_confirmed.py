"""The worlds of `log_world.py` and `log_rebuilt.py`, whose writers also say what they are about to confirm to their slot.

The slot is confirmed once all machines of the writer have that durably. From then on every member has to know it: each may
be the only one that is left for the next writer, which compares it with the slot.
"""

from dataclasses import dataclass, field, replace
from functools import partial

from tests.support.log_rebuilt import RebuiltWorld
from tests.support.log_world import LEAST, Machine, Violation, World, Writer
from walsender_bridge.change_log.protocol import MAX_COUNT
from walsender_bridge.change_log.replica.core import Replica, ReplicaState
from walsender_bridge.change_log.replica.synchronization import SyncBatch
from walsender_bridge.change_log.repository import membership, rebuild
from walsender_bridge.change_log.repository.core import StreamState
from walsender_bridge.change_log.repository.rebuild import RebuildPlan, StreamPlan
from walsender_bridge.postgres.protocol.lsn import WalPosition

NOTHING = WalPosition(0, 0)


@dataclass
class Confirmation:
    """A heartbeat of a writer. `acked`: the machines that have it durably."""

    position: WalPosition
    acked: set[str] = field(default_factory=set)


class ConfirmedWorld(World):
    """See the module."""

    EVENTS = (*World.EVENTS, ("confirm", 10))

    def __init__(self, seed: int, names: str = "klm") -> None:
        #: How far a writer has gone, and what a slot was confirmed to.
        self.reached, self.confirmed = 0, NOTHING
        #: Of the repository that has a replica synchronized, which may be an old leader.
        self.sync_term = self.sync_version = 0
        super().__init__(seed, names)

    def confirm(self) -> None:
        """A living writer says to all its machines what it is about to confirm."""
        # One that has come back on a machine alone has nothing to confirm.
        living = [each for each in self.writers if each.alive and len(each.sessions) >= LEAST]
        if not living:
            return
        writer = self.choose.choice(living)
        self.reached += 1
        confirmation = Confirmation(WalPosition(1, self.reached))
        for name in writer.sessions:
            self.send(partial(self.tell, name, writer, confirmation))

    def tell(self, name: str, writer: Writer, confirmation: Confirmation) -> None:
        machine = self.machines[name]
        if machine.session != writer.sessions[name]:
            writer.alive = False
            return
        machine.do(lambda core: core.append([], confirm_to=confirmation.position))
        confirmation.acked.add(name)
        if confirmation.acked == {*writer.sessions}:
            self.confirmed = max(self.confirmed, confirmation.position)

    def join(self) -> None:
        """As `Replication._join`: one that was told something else than the members takes that from them first."""
        seal = self.seal
        before = set() if seal is None else {*seal.sealed}
        super().join()
        if seal is None:
            return
        known = max(map(self._told, before), default=NOTHING)
        seal.sealed -= {each for each in seal.sealed - before if self._told(each) != known}

    def _told(self, name: str) -> WalPosition:
        machine = self.machines.get(name)
        core = None if machine is None else machine.core
        return (core and membership.told(core.status())[0]) or NOTHING

    def begin_sync(self, known: StreamState | None = None) -> None:
        stream = known or self.stream
        self.sync_term, self.sync_version = stream.term, stream.latest.version
        super().begin_sync(known)

    def sync_init(self, source: Machine, machine: Machine) -> tuple[str, list[SyncBatch]] | None:
        """As `Replication._in_sync`: one that has all entries is synchronized, too."""
        core = machine.core
        if (
            core is not None
            and core.state == ReplicaState.SEALED
            and self._told(machine.name) != self._told(source.name)
        ):
            term, version = self.sync_term, self.sync_version
            self.attempt(lambda: machine.do(lambda core: core.seal(MAX_COUNT, term, version)))
        return super().sync_init(source, machine)

    def check(self) -> None:
        super().check()
        for name in self.stream.members:
            machine = self.machines.get(name)
            core = None if machine is None else machine.core
            if core is None or core.state == ReplicaState.LEARNING:
                continue
            if (core.durable.confirmed_to or NOTHING) < self.confirmed:
                raise Violation(
                    f"23: the slot is at {self.confirmed}, and member {name} knows {core.durable.confirmed_to}"
                )


class RebuiltConfirmedWorld(ConfirmedWorld, RebuiltWorld):
    """See the module."""

    EVENTS = (*RebuiltWorld.EVENTS, ("confirm", 10))

    def _members(self, plan: RebuildPlan, stream: StreamPlan) -> tuple[str, ...]:
        """As `Rebuilder._stream`."""
        cores = {name: self.machines[name].core for name in stream.members}
        known = rebuild.with_told(
            stream, {name: core.status() for name, core in cores.items() if core is not None}
        )
        offers = [each for each in map(self._offer_of, stream.members) if each is not None]
        newest = rebuild.newest_context(stream, offers)
        if known != stream and newest is not None:
            for name in stream.members:
                self._answers(name).do(partial(Replica.commit, context=newest))
                self._seal_for(stream, name, plan.fence)
        for name in {*stream.members} - {*known.members}:
            self._seal_for(replace(stream, end=MAX_COUNT), name, plan.fence)
        return super()._members(plan, known)
