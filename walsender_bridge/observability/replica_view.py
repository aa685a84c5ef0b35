"""Streams of the change log that have fewer replicas in sync than they should: the log goes on, and needs an operator's look. Pure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from walsender_bridge.change_log.repository_messages import ReplicaPlace, StreamDescription

_ADD: Final = "start another log server and add it as a [[log_server]] where the repository runs, then restart the bridge there"
_START: Final = "run tuskline up on its machine, or check the network between; it is synchronized once it answers"
_WAIT: Final = (
    "it is being synchronized; tuskline log status shows how far it is, and its log why if it lasts"
)


@dataclass(frozen=True, slots=True)
class StreamReplicas:
    """The replicas of one stream. `wanted`: how many should be in sync."""

    stream: str
    wanted: int
    places: tuple[ReplicaPlace, ...]

    @property
    def in_sync(self) -> int:
        """How many are in sync."""
        return sum(place.in_sync for place in self.places)

    @property
    def missing(self) -> int:
        """How many should be in sync and are not."""
        return max(self.wanted - self.in_sync, 0)

    def degraded(self) -> Iterator[str]:
        """What is less safe than it should be, as sentences."""
        if self.missing:
            short = f"stream {self.stream} has {self.in_sync} of {self.wanted} replicas in sync"
            yield f"log: {short}" + (f"; {_ADD}" if len(self.places) < self.wanted else "")
        for place in self.places:
            if not place.in_sync:
                where = f"log: the replica of stream {self.stream} at {place.address or place.log_server}"
                why = "" if place.answers else ", and its log server does not answer"
                yield f"{where} is not in sync{why}; {_WAIT if place.answers else _START}"


def of_streams(
    streams: Iterable[StreamDescription], replicas: int | None
) -> tuple[StreamReplicas, ...]:
    """All streams. `replicas`: how many each is to have; None: as many as it was assigned."""
    return tuple(
        StreamReplicas(each.stream, replicas or len(each.replicas), each.replicas)
        for each in streams
    )
