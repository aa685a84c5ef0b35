"""The members of the WAL quorum, and its majorities (rule 10).

A membership changes in two steps, each one generation: first `members` and `new_members` together, where
every decision needs a majority of *each*, then `new_members` alone. So a decision of the old members and one of the new
ones always share a member (Raft's joint consensus).

A configuration is ordered by (term, generation): an elected proposer stamps its own term on the greatest
configuration that its voters held, and sends it to a quorum with `Elected`, before it may change anything. So what an
older proposer left on a minority never comes back.

A member whose disk was rolled back has lost promises, and it is unknown which. It is *distrusted*, by a configuration
like any other: it still counts in the size of each majority, so commits and elections need as many others as before, but
neither its vote nor its acknowledgement counts. It leaves with the membership that replaces it.

Versions are compared within one quorum only. A quorum's id is drawn at random with its first membership and never
changes; a membership of another id is another quorum's, whatever its term. Before ids existed a membership had none
(0): a proposer gives it one with `Elected`, as soon as a quorum of that very membership has voted for it.

A member is named by an identity that is drawn at random *with its data directory*: a safekeeper that lost
its disk has another identity, is no member, and its earlier votes and acknowledgements are not its own.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from walsender_bridge.errors import UsageError
from walsender_bridge.postgres.protocol.lsn import Lsn

#: Safekeepers in one membership. Every quorum is counted at each acknowledgement.
MAX_MEMBERS = 15


@dataclass(frozen=True, slots=True)
class Configuration:
    """See the module. Identities and `quorum` are 128-bit numbers. Generation 0 has no members: none is known yet."""

    generation: int = 0
    members: frozenset[int] = frozenset()
    new_members: frozenset[int] | None = None
    term: int = 0
    distrusted: frozenset[int] = frozenset()
    quorum: int = 0

    def __post_init__(self) -> None:
        for group in (self.members, self.new_members or ()):
            if len(group) > MAX_MEMBERS:
                raise UsageError(f"{len(group)} safekeepers exceed the limit of {MAX_MEMBERS}")

    def __bool__(self) -> bool:
        return bool(self.members)

    @property
    def version(self) -> tuple[int, int]:
        """Of two configurations the one with the greater version is in force."""
        return self.term, self.generation

    @property
    def everyone(self) -> frozenset[int]:
        """Members of either membership."""
        return self.members if self.new_members is None else self.members | self.new_members

    @property
    def groups(self) -> tuple[frozenset[int], ...]:
        """The memberships of each of which a majority is needed."""
        return (self.members,) if self.new_members is None else (self.members, self.new_members)

    def has_quorum(self, there: Collection[int]) -> bool:
        """Whether a majority of each membership is among `there`. Never, without members."""
        trusted = set(there) - self.distrusted
        return all(len(group & trusted) >= majority(group) > 0 for group in self.groups)

    def quorum_lsn(self, flush_lsns: Mapping[int, Lsn]) -> Lsn:
        """The LSN that a majority of each membership has on disk; a missing member counts as 0."""
        return min(self.majority_lsn(group, flush_lsns) for group in self.groups)

    def majority_lsn(self, group: Collection[int], flush_lsns: Mapping[int, Lsn]) -> Lsn:
        """The greatest LSN that a majority of the group has reached; 0 for an empty group."""
        if not group:
            return 0
        distrusted = self.distrusted
        reached = [0 if each in distrusted else flush_lsns.get(each, 0) for each in group]
        return sorted(reached, reverse=True)[majority(group) - 1]

    @property
    def trusted(self) -> frozenset[int]:
        """Members of either membership whose votes and acknowledgements count."""
        return self.everyone - self.distrusted if self.distrusted else self.everyone

    def distrusting(self, member: int) -> "Configuration":
        """The same membership, in which this member's promises no longer count."""
        return replace(self, generation=self.generation + 1, distrusted=self.distrusted | {member})

    def stamped(self, term: int, quorum: int = 0) -> "Configuration":
        """The same membership, in force for the proposer of `term`; and of `quorum`, if it has no id yet."""
        assert self.quorum in {0, quorum} or not quorum, "a quorum's id never changes"
        return replace(self, term=term, quorum=self.quorum or quorum)

    def is_foreign(self, quorum: int) -> bool:
        """Whether it is another quorum's.

        One from before ids existed may belong to any quorum, and so may a first one that no elected proposer has stamped: two
        proposers may start at once, and the safekeepers' votes go to either.
        """
        return self.term > 0 and self.quorum not in {0, quorum}

    def joint(self, new_members: Collection[int]) -> "Configuration":
        """The first step of a change. Raises `UsageError` during another change, or without members."""
        if self.new_members is not None:
            raise UsageError(
                "the membership is changing already", repair="wait until that change is complete"
            )
        if not new_members:
            raise UsageError("a quorum needs members")
        return replace(self, generation=self.generation + 1, new_members=frozenset(new_members))

    def completed(self) -> "Configuration":
        """The second step of a change."""
        assert self.new_members is not None
        return replace(
            self,
            generation=self.generation + 1,
            members=self.new_members,
            new_members=None,
            distrusted=self.distrusted & self.new_members,
        )


def majority(group: Collection[int]) -> int:
    """The size of a majority of a group."""
    return len(group) // 2 + 1 if group else 0


def newest(configurations: Collection[Configuration]) -> Configuration:
    """The configuration in force among these of one quorum."""
    return max(configurations, key=lambda each: each.version, default=Configuration())
