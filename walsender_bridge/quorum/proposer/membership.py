"""The membership by which the proposer counts, when the next one is in force, and when a change is done (rule 10).

Invariant: the proposer counts by the greatest configuration that it knows; before it counts by the new members alone, a
majority of the old and of the new ones have persisted the joint configuration, and a majority of the new ones has all
committed WAL. So any later election, by whichever of the configurations its voters hold, shares a voter with every
commit.

A configuration in force is not yet *settled*. As long as the new members hold only the joint configuration, the next
proposer still needs a majority of the old ones: if those were shut down then, and one more disk were lost, no proposer
could ever be elected. So a change is done, and removed members may be shut down, only when a majority of the new members
(of both, during the joint one) has persisted the configuration in force. Then a minority of the new members may be lost,
and any remaining majority still holds the configuration that names it.
"""

from dataclasses import replace

from walsender_bridge.errors import UsageError
from walsender_bridge.quorum.proposer.replication import Streaming
from walsender_bridge.quorum.protocol.configuration import Configuration, newest
from walsender_bridge.quorum.safekeeper.votes import other_quorum


class Membership:
    """The configuration in force, the generation that each member has persisted in this term, and `settled`.

    `quorum`: the proposer's. A membership of another quorum is never learned, whatever its version. One from before ids
    existed is learned only while the one in force has no id either, and from its members only: without an id, a non-member
    could report a quorum of its own.
    """

    __slots__ = ("configuration", "persisted", "quorum", "settled")

    def __init__(self, configuration: Configuration, quorum: int = 0) -> None:
        self.configuration = configuration
        self.quorum = configuration.quorum or quorum
        self.persisted: dict[int, int] = {}
        self.settled = False

    @property
    def proposed(self) -> Configuration:
        """The configuration in a vote request: the one in force, with this quorum's id."""
        return replace(self.configuration, quorum=self.quorum)

    def foreign(self, configuration: Configuration) -> str:
        """Why a safekeeper that holds this one cannot belong to this quorum; empty: it can."""
        if not configuration.is_foreign(self.quorum):
            return ""
        return other_quorum(configuration.quorum, self.quorum)

    def learn(self, configuration: Configuration, holder: int) -> None:
        """The safekeeper with this identity holds this one."""
        known = self.configuration
        without_id = not configuration.quorum and not known.quorum and holder in known.everyone
        if configuration.quorum == self.quorum or without_id:
            self.configuration = newest((known, configuration))

    def use(self, configuration: Configuration) -> None:
        """Count by this one from now on."""
        self.configuration, self.settled = configuration, False

    def holds(self, member: int, generation: int) -> bool:
        """A member has persisted this generation of this term. Returns whether that settles the configuration."""
        self.persisted[member] = generation
        if self.settled:
            return False
        current = self.configuration.generation
        holders = {each for each, held in self.persisted.items() if held >= current}
        self.settled = self.configuration.has_quorum(holders)
        return self.settled

    def begin(self, members: frozenset[int], streaming: Streaming | None) -> Configuration:
        """The first step of a change. Raises `UsageError` when it cannot begin now.

        A quorum in this term must hold this proposer's own configuration before it creates another.
        """
        if streaming is None or not streaming.established or not self.settled:
            raise UsageError(
                "the membership cannot change before a quorum follows this proposer and holds the current one",
                repair="wait until the quorum commits",
            )
        return self.configuration.joint(members)

    def next_step(self, streaming: Streaming) -> Configuration | None:
        """The second step, when the first is complete."""
        configuration = self.configuration
        if configuration.new_members is None or not streaming.established:
            return None
        reached = configuration.majority_lsn(configuration.new_members, streaming.acked)
        if not self.settled or reached < streaming.commit_lsn:
            return None
        return configuration.completed()
