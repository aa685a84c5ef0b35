"""The world of `log_rebuilt.py`, with disks of several segments, of which the newest is damaged or gone before the records are lost.

A segment keeps the state record with which it was filled. The start that meets the damage can read nothing; the next one has the
record of the segment before, and knows that there is damage. What that record says was true once.

By chance alone, the faults that matter here hardly meet. So they are staged, with chance in between: a replica is copied from
another one, which fills a segment, and is a member again; the stream goes on without the one that it was copied from; its newest
segment is damaged; a leader that has been deposed has it copied once more, from the one that was left out; and the records are lost.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from tests.support.log_rebuilt import RebuiltWorld
from tests.support.log_world import Disk, Machine, Violation
from walsender_bridge.change_log.replica.core import Replica, ReplicaState
from walsender_bridge.change_log.replica.disk import Durable, Effect, PutIndex, StoredReplica, Wipe
from walsender_bridge.change_log.replica.synchronization import source_of

#: Commits of a segment on average: one whose checksum is a multiple of this fills it.
COMMITS = 2
#: How often a stage waits for what it has begun.
ROUNDS = 6


class SegmentedDisk(Disk):
    """`filled`: the state records of the segments before the newest one. `broken`: the newest is damaged. `renamed`: one was."""

    def __init__(self) -> None:
        super().__init__()
        self.filled: list[Durable] = []
        self.broken = self.renamed = False

    def apply(self, effects: Sequence[Effect]) -> None:
        super().apply(effects)
        if self.durable is None:
            return
        if any(isinstance(each, Wipe) for each in effects):
            self.filled, self.broken, self.renamed = [], False, False
        low = self.durable.low_offset
        self.filled = [each for each in self.filled if each.committed_end > low]
        ends = [each.row.position.crc for each in effects if isinstance(each, PutIndex)]
        if ends and not ends[-1] % COMMITS:
            self.filled.append(self.durable)

    def rename_newest(self) -> None:
        """What is left is the segments before."""
        self.broken, self.renamed = False, True
        self.durable = self.filled.pop() if self.filled else None
        end = 1 if self.durable is None else self.durable.committed_end
        self.entries = {o: data for o, data in self.entries.items() if o < end}
        self.rows = [row for row in self.rows if row.context.end <= end]

    def found(self) -> StoredReplica:
        damage = "a segment was damaged and has been renamed" if self.renamed else ""
        return replace(super().found(), damage=damage)


class SegmentedMachine(Machine):
    """A machine with such a disk."""

    disk: SegmentedDisk

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.disk = SegmentedDisk()

    @property
    def is_whole(self) -> bool:
        """Whether its replica takes part."""
        return self.core is not None and self.core.state != ReplicaState.LEARNING

    @property
    def copied_from(self) -> str:
        """The machine from which the segment before its newest one was filled; empty: from none."""
        filled = self.disk.filled
        return source_of(filled[-1].syncing_from or "") if filled else ""

    def recover(self) -> None:
        if self.disk.broken:
            self.disk.rename_newest()
            self.core = self.lost()
        elif self.disk.renamed and self.disk.durable is None:
            self.core = self.lost()
        else:
            super().recover()


class DamagedRebuiltWorld(RebuiltWorld):
    """See the module."""

    MACHINE = SegmentedMachine
    EVENTS = (*RebuiltWorld.EVENTS, ("damage_newest", 0.3))

    def __init__(self, seed: int, names: str = "klm") -> None:
        #: The machine that alone has everything behind a stage; empty: there was none before this rebuild.
        self.whole = ""
        #: What machines were told of their joins: it may arrive once more.
        self.told: list[tuple[str, str]] = []
        super().__init__(seed, names)

    def segmented(self, name: str) -> SegmentedMachine:
        """A machine that is there."""
        machine = self.machines[name]
        assert isinstance(machine, SegmentedMachine)
        return machine

    def lose_repository(self) -> None:
        self.whole = ""
        if self.choose.random() < 0.6:
            self.stage()
        super().lose_repository()

    def _given_up(self) -> list[str]:
        if self.whole in self.machines and self.choose.random() < 0.7:
            return [self.whole]
        # The operator finds that it is needed.
        self.whole = ""
        return super()._given_up()

    def damage_newest(self, name: str = "") -> bool:
        """As long as another member has everything; all others have, and are enough, where none is named."""
        if not name and not self._may_lose(name := self.choose.choice([*self.machines])):
            return False
        others = [each for each in self.stream.members if each != name]
        if not others or not all(
            each in self.machines and self._has_its_own(each) for each in others
        ):
            return False
        self.faults += 1
        machine = self.segmented(name)
        machine.disk.broken = machine.lost_entries = True
        for _ in range(self.choose.choice((1, 2, 2))):
            machine.restart()
        return True

    def _has_its_own(self, name: str) -> bool:
        machine = self.segmented(name)
        return machine.is_whole and not self.is_copy(machine)

    # -- the stage ------------------------------------------------------------------------------------

    def stage(self) -> None:
        """See the module. Any step may fail, and then the rest is what comes of it."""
        if not self._mended():
            return
        copied, source, other = self.choose.sample(sorted(self.machines), 3)
        if self.choose.random() < 0.7:
            self._go_on_without(copied, self.choose.randrange(3, 8))
            self._copy(source, copied)
            self._go_on_without("", self.choose.choice((0, 0, 1)))
        self._go_on_without(source, self.choose.choice((1, 1, 2)))
        filled_from = self.segmented(copied).copied_from
        if not self.damage_newest(copied):
            return
        self.whole = other
        self.happened["a copied member is damaged"] += filled_from == source
        if self.choose.random() < 0.5:
            self._copy(source, copied)
            self.happened["a damaged member is copied"] += self.segmented(copied).is_whole
        if self.choose.random() < 0.3:
            self._late_messages()

    def _mended(self) -> bool:
        """Whether all machines are members, after a while without faults."""
        for _ in range(ROUNDS):
            if len(self.stream.members) == len(self.machines) and all(
                each in self.machines and self.segmented(each).is_whole
                for each in self.stream.members
            ):
                return True
            self.restart()
            self.assign()
            self._seal_without("")
            for name in self.stream.outside:
                if name in self.machines and self.stream.members[0] in self.machines:
                    self._copy(self.stream.members[0], name)
            self.join()
            self.end_seal()
            self._deliver_but_to("")
        return False

    def _seal_without(self, out: str) -> None:
        for writer in self.writers:
            writer.alive = False
        self.begin_seal()
        self._deliver_but_to(out)

    def _deliver_but_to(self, out: str) -> None:
        """All messages but those to one machine, which arrive later."""
        while due := [
            each
            for each in self.messages
            if not (isinstance(each, partial) and each.args[:1] == (out,))
        ]:
            self.messages.remove(due[0])
            self.attempt(due[0])

    def _go_on_without(self, out: str, commits: int) -> None:
        """A machine is not reached for a while, in which the others commit, and readers see it."""
        self._seal_without(out)
        self.join()
        self.end_seal()
        self.open_writer()
        for _ in range(commits):
            self.write()
            self._deliver_but_to(out)
            for _ in range(3):
                self.report()
                self.tick()
                self._deliver_but_to(out)
            self.check()

    def _copy(self, source: str, to: str) -> None:
        """By whoever takes the source for a member."""
        core = self.machines[to].core
        stream = self.stream
        if core is not None and core.state not in {ReplicaState.LEARNING, ReplicaState.CLOSED}:
            end, term, version = stream.last.context.end, stream.term, stream.latest.version
            its = partial(Replica.seal, end=end, term=term, version=version)
            self.attempt(partial(self.machines[to].do, its))
        if self.machines[source].core is None or not self.segmented(source).is_whole:
            return
        label, batches = self.sync_init(self.machines[source], self.machines[to]) or ("", [])
        for batch in batches:
            if self.choose.random() < 0.02:
                return
            its = partial(Replica.sync_replicate, source=label, batch=batch)
            if not self.attempt(partial(self.machines[to].do, its)):
                return

    def joined(self, name: str, replaced_by: str) -> None:
        super().joined(name, replaced_by)
        self.told.append((name, replaced_by))

    def _late_messages(self) -> None:
        for name, replaced_by in self.told:
            self.attempt(partial(super().joined, name, replaced_by))
        for _ in range(self.choose.randrange(8)):
            self.deliver()
        for _ in range(self.choose.randrange(3)):
            self.old_leader()
            self.reopen()

    # -- the end --------------------------------------------------------------------------------------

    def finish(self) -> None:
        super().finish()
        while self.messages:
            self.attempt_message()
        for name, machine in self.machines.items():
            if machine.core is not None and machine.core.current.replaced_by:
                raise Violation(f"{name} is a member, and does not know it")
