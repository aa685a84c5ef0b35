"""Breadth-first search of all states of a small cluster; a stopped search can be resumed.

A state is recorded by 64 bits of its BLAKE2b hash. Two of n states collide with a probability below n*n / 2**65: 1 in
100,000 for 18 million.
"""

import pickle
import time
from array import array
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from struct import pack, unpack

from tests.support.quorum.explorer import Cluster, Scope, State


class ViolationError(AssertionError):
    """An invariant is violated; the message has the shortest path there."""


class Numbering:
    """States as numbers of their parts, which are all kept."""

    def __init__(self, cluster: Cluster) -> None:
        self.parts, self.pasts = cluster.parts, cluster.claims.pasts
        self.width, self.count = cluster.width, len(cluster.scope.starts)
        width, count = self.width, self.count
        self._key = f"<{width * (1 + 2 * count) + 2 * count + 2}I"
        self._whole = f"<{width * (1 + count) + 2 * count + 2}I"

    def key(self, state: State) -> int:
        """64 bits, equal for states that differ only by a renumbering of the safekeepers: all state of one is in its part."""
        links, width = state.links, self.width
        per = []
        for peer, part in enumerate(state.safekeepers):
            numbers = [part.anonymous]
            for number, proposer in enumerate(state.proposers):
                link = links[number * width + peer]
                numbers.append(0 if link is None else link.number + 1)
                numbers.append(0 if proposer is None else proposer.peers[peer] + 1)
            per.append(numbers)
        per.sort()
        flat = [each for numbers in per for each in numbers]
        flat += [0 if each is None else each.inside + 1 for each in state.proposers]
        whole = pack(self._key, *flat, *state.streamed, state.past.number, state.breaks)
        return int.from_bytes(blake2b(whole, digest_size=8).digest())

    def packed(self, state: State) -> bytes:
        """The state in few bytes, for a queue."""
        links = [0 if each is None else each.number + 1 for each in state.links]
        proposers = [0 if each is None else each.number + 1 for each in state.proposers]
        safekeepers = [each.number for each in state.safekeepers]
        rest = *state.streamed, state.past.number, state.breaks
        return pack(self._whole, *safekeepers, *links, *proposers, *rest)

    def unpacked(self, packed: bytes) -> State:
        """The state that was packed."""
        numbers, width, count = unpack(self._whole, packed), self.width, self.count
        parts, middle = self.parts, width * (1 + count)
        safekeepers = [parts.safekeepers.values[each] for each in numbers[:width]]
        links = [parts.links.values[each - 1] if each else None for each in numbers[width:middle]]
        proposers = [
            parts.proposers.values[each - 1] if each else None
            for each in numbers[middle : middle + count]
        ]
        streamed = list(numbers[middle + count : middle + 2 * count])
        return State(
            safekeepers, proposers, streamed, links, self.pasts.values[numbers[-2]], numbers[-1]
        )


class Search:
    """A search of all states of a scope. `states`: the distinct ones that were reached.

    `traced`: record the path to each state, which takes most of the memory.
    """

    def __init__(self, scope: Scope, *, traced: bool = True) -> None:
        self.cluster = Cluster(scope)
        self.traced = traced
        self.depth = 0
        self.seconds = 0.0
        self.transitions = 0
        self.numbering = Numbering(self.cluster)
        first = self.cluster.first()
        key = self.numbering.key(first)
        self.seen = {key}
        #: The origin of each state: the previous key, and the number of the step.
        self.came: dict[int, tuple[int, str]] = {}
        self.layer = [self.numbering.packed(first)]
        self.following: list[bytes] = []

    @property
    def complete(self) -> bool:
        """Whether all successors are known."""
        return not self.layer

    @property
    def states(self) -> int:
        return len(self.seen)

    def run(
        self, seconds: float = float("inf"), progress: Callable[[str], None] | None = None
    ) -> None:
        """Continue until all states are known, the scope's limit is reached, or the time is over.

        Raises `ViolationError` at the first violation.
        """
        began = time.monotonic()
        before = self.seconds
        while self.layer and self.states < self.cluster.scope.limit:
            self.seconds = before + time.monotonic() - began
            if self.seconds - before > seconds:
                return
            if self.step(20_000) and progress and self.layer:
                progress(self.report())
        self.seconds = before + time.monotonic() - began

    def report(self) -> str:
        """The progress, in words."""
        rate = self.states / self.seconds if self.seconds else 0
        rest = f"{len(self.layer)} of the last step" if self.layer else "complete"
        return (
            f"{self.states} distinct states, {self.depth} steps deep ({rest}), {rate:.0f} states/s"
        )

    def step(self, count: int) -> bool:
        """Expand so many states of the layer; returns whether those were the last ones."""
        cluster, numbering, seen = self.cluster, self.numbering, self.seen
        taken, self.layer = self.layer[-count:], self.layer[:-count]
        for packed in taken:
            state = numbering.unpacked(packed)
            for name, act in cluster.actions(state):
                following = state.clone()
                self.transitions += 1
                try:
                    act(following)
                    cluster.check(following)
                except Exception as error:
                    raise ViolationError(
                        f"{error!r} {self._way(numbering.key(state), name)}"
                    ) from error
                key = numbering.key(following)
                if key not in seen:
                    seen.add(key)
                    if self.traced:
                        self.came[key] = numbering.key(state), name
                    self.following.append(numbering.packed(following))
        if self.layer:
            return False
        self.layer, self.following = self.following, []
        self.depth += 1
        return True

    def _way(self, key: int, last: str) -> str:
        """The path to a state, up to a renumbering of the safekeepers between two steps."""
        if not self.traced:
            return f"{self.depth + 1} steps deep: {last}; search again with `traced` for the path"
        steps = [last]
        while key in self.came:
            key, name = self.came[key]
            steps.append(name)
        return "after\n  " + "\n  ".join(reversed(steps))

    # -- saving and resuming ------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Save the search, to be resumed."""
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / "search.new"
        seen, self.seen = self.seen, set()
        try:
            with new.open("wb") as file:
                array("Q", seen).tofile(file)
                file.write(pickle.dumps(self, protocol=5))
                file.write(len(seen).to_bytes(8, "little"))
        finally:
            self.seen = seen
        new.rename(folder / "search")


def resumed(folder: Path) -> Search | None:
    """The search that was saved there."""
    path = folder / "search"
    if not path.exists():
        return None
    with path.open("rb") as file:
        file.seek(-8, 2)
        count = int.from_bytes(file.read(8), "little")
        file.seek(0)
        seen = array("Q")
        seen.fromfile(file, count)
        search = pickle.load(file)  # noqa: S301 -- our own file
    assert isinstance(search, Search)
    search.seen = set(seen)
    return search
