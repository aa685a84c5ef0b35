"""The world of `log_world.py`, with log servers that are put back to an older state, as with a snapshot of a virtual machine.

Such a member lacks what it has acknowledged since, and may have entries that a seal has removed. While it is one, others have what
is committed. It is not to serve or to take what is not so.
"""

import copy
from collections.abc import Callable

from tests.support.log_world import Disk, Machine, World
from walsender_bridge.change_log.replica.core import Replica, ReplicaState
from walsender_bridge.change_log.replica.disk import Effect


class RestoredMachine(Machine):
    """`older`: a copy of its disk. `behind`: it was put back, and has not been synchronized since."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.older: Disk | None = None
        self.behind = False

    def put_back(self) -> None:
        """Have the disk as it was when it was copied."""
        assert self.older is not None
        self.disk, self.older = self.older, None
        self.behind = True
        self.restart()

    def do(self, event: Callable[[Replica], list[Effect]]) -> None:
        """See `Machine.do`. A synchronization brings what it lacks."""
        super().do(event)
        assert self.core is not None
        self.behind &= self.core.state != ReplicaState.LEARNING


class RestoredWorld(World):
    """See the module."""

    MACHINE = RestoredMachine
    EVENTS = (*World.EVENTS, ("copy_disk", 2), ("put_back", 0.7))

    def copy_disk(self) -> None:
        """What may be put back later."""
        machine = self._any()
        if machine.disk.durable is not None:
            machine.older = copy.deepcopy(machine.disk)

    def put_back(self) -> None:
        """As long as the others have everything."""
        machine = self._any()
        if machine.older is None or not self._may_lose(machine.name):
            return
        self.faults += 1
        machine.put_back()

    def _may_lose(self, name: str) -> bool:
        others = [each for each in self.machines.values() if each.name != name]
        return super()._may_lose(name) and not any(map(behind, others))

    def _any(self) -> RestoredMachine:
        machine = self.choose.choice([*self.machines.values()])
        assert isinstance(machine, RestoredMachine)
        return machine

    def excused(self, machine: Machine) -> bool:
        """It lacks what it has lost with its disk, until it is synchronized."""
        return behind(machine)


def behind(machine: Machine) -> bool:
    """Whether it was put back, and has not been synchronized since."""
    return isinstance(machine, RestoredMachine) and machine.behind
