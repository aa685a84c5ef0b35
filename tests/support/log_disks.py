"""The world of `log_world.py`, with disks that are full for a while, and damage that only a write meets.

What cannot be written changes nothing: the core is recovered from the disk, and the writer's session goes on. A damaged disk is
kept aside by the write that meets the damage; its replica has nothing from then on.
"""

from tests.support.log_world import World


class DiskWorld(World):
    """See the module."""

    EVENTS = (*World.EVENTS, ("fill_disk", 0.5), ("free_disks", 2), ("damage_disk", 0.3))

    def fill_disk(self) -> None:
        """Nothing can be written there until there is room again."""
        self.faults += 1
        self.choose.choice([*self.machines.values()]).disk.full = True

    def free_disks(self) -> None:
        """There is room on all disks."""
        for machine in self.machines.values():
            machine.disk.full = False

    def damage_disk(self) -> None:
        """Damage that no read meets."""
        name = self.choose.choice([*self.machines])
        if self._may_lose(name):
            self.faults += 1
            self.machines[name].disk.damaged = True

    def finish(self) -> None:
        """See `World.finish`."""
        self.free_disks()
        super().finish()
