"""Which membership the proposer counts by, and when the next one is in force (rule 10).

Invariant: the proposer counts by the greatest configuration that it knows; before it counts by the new
members alone, a majority of the old and of the new ones have persisted the joint configuration, and a
majority of the new ones has everything that is committed. So any later election, by whichever of the
configurations its voters hold, shares a voter with every commit.
"""

from walsender_bridge.errors import UsageError
from walsender_bridge.proposer.streaming import Streaming
from walsender_bridge.safekeeper.configuration import Configuration, majority_lsn, newest


class Membership:
    """The configuration in force, and the generation that each member has persisted in this term."""

    __slots__ = ("configuration", "persisted")

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.persisted: dict[int, int] = {}

    def learn(self, configuration: Configuration) -> None:
        """A safekeeper holds this one."""
        self.configuration = newest((self.configuration, configuration))

    def begin(self, members: frozenset[int], streaming: Streaming | None) -> Configuration:
        """The first step of a change. Raises `UsageError` when it cannot begin now.

        A quorum in this term must hold this proposer's own configuration before it makes another.
        """
        if streaming is None or not streaming.established:
            raise UsageError(
                "the membership cannot change before a quorum follows this proposer",
                repair="wait until the quorum commits",
            )
        return self.configuration.joint(members)

    def next_step(self, streaming: Streaming) -> Configuration | None:
        """The second step, when the first is complete."""
        configuration = self.configuration
        if configuration.new_members is None or not streaming.established:
            return None
        holders = {
            each for each, held in self.persisted.items() if held >= configuration.generation
        }
        reached = majority_lsn(configuration.new_members, streaming.acked)
        if not configuration.has_quorum(holders) or reached < streaming.commit_lsn:
            return None
        return configuration.completed()
