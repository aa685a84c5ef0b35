"""The world of `log_world.py`, with power cuts: a disk loses what was not synced when the power went.

A write is synced before its answer leaves the machine, and a record of the repository before anybody hears of it. So a cut in the
middle of a write undoes it, and nobody has been told of it; several machines may lose their power at once, the repository's too.
"""

import copy
from collections.abc import Sequence
from typing import Any

from tests.support.log_world import Machine, World
from walsender_bridge.change_log.replica.disk import Effect
from walsender_bridge.errors import UnavailableError


class PowerMachine(Machine):
    """A machine whose disk keeps, in a power cut, what it had when it was last synced. `cuts_in`: writes until the next cut."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.cuts_in = 0
        self._synced: dict[str, Any] = {}
        self.sync()

    def create(self) -> None:
        super().create()
        self.sync()

    def write(self, effects: Sequence[Effect]) -> None:
        super().write(effects)
        if not effects:
            return
        self.cuts_in -= 1
        if self.cuts_in == 0:
            self.cut()
            raise UnavailableError("the power went before the write was synced")
        self.sync()

    def sync(self) -> None:
        """What is on the disk now outlasts a power cut."""
        self._synced = {name: copy.copy(value) for name, value in vars(self.disk).items()}

    def cut(self) -> None:
        """The power goes. The machine reports nothing until it is restarted; a message may meet it before."""
        for name, value in self._synced.items():
            setattr(self.disk, name, copy.copy(value))
        self.up, self.session = False, self.session + 1
        self.recover()


class PowerWorld(World):
    """See the module."""

    MACHINE = PowerMachine
    EVENTS = (*World.EVENTS, ("cut_power", 0.6), ("cut_within_a_write", 1), ("cut_all", 0.2))

    def cut_power(self) -> None:
        """Of one machine, between two writes."""
        self.faults += 1
        self._cut(self.choose.choice([*self.machines]))

    def cut_within_a_write(self) -> None:
        """Of one machine, in the middle of one of its next writes."""
        self.faults += 1
        machine = self.machines[self.choose.choice([*self.machines])]
        assert isinstance(machine, PowerMachine)
        machine.cuts_in = self.choose.randrange(1, 4)

    def cut_all(self) -> None:
        """Of all machines at once, and of the repository's."""
        self.faults += 1
        for name in self.machines:
            self._cut(name)
        self.restart_repository()

    def _cut(self, name: str) -> None:
        machine = self.machines[name]
        assert isinstance(machine, PowerMachine)
        machine.cut()
        self.syncs.pop(name, None)

    def finish(self) -> None:
        """See `World.finish`."""
        for machine in self.machines.values():
            assert isinstance(machine, PowerMachine)
            machine.cuts_in = 0
        super().finish()
