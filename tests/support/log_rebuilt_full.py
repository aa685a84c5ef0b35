"""The world of `log_rebuilt.py`, with disks that are full, and an operator who gives a rebuild up after few attempts.

The former repository is found again then, and goes on: its records know nothing of the seals that the attempts have left.
"""

from collections.abc import Sequence

from tests.support.log_disks import DiskWorld
from tests.support.log_rebuilt import RebuiltWorld
from tests.support.log_world import World


class FullRebuiltWorld(RebuiltWorld, DiskWorld):
    """See the module."""

    EVENTS = (
        *RebuiltWorld.EVENTS,
        *(each for each in DiskWorld.EVENTS[len(World.EVENTS) :] if each[0] != "damage_disk"),
    )
    ATTEMPTS = 2

    def _complete(self, given_up: Sequence[str]) -> None:
        self.free_disks()
        super()._complete(given_up)
