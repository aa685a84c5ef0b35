"""Streams of the change log that have fewer replicas in sync than they should: the log goes on, and needs an operator's look. Pure.

A replica on a log server that the configuration does not name is a problem: nobody asks it, and it does not come back.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from walsender_bridge.change_log.repository_messages import ReplicaPlace, StreamDescription

_ADD: Final = "start another log server and add it as a [[log_server]] where the repository runs, then restart the bridge there"
_START: Final = "run tuskline up on its machine, or check the network between; it is synchronized once it answers"
_NAME: Final = (
    "correct the addresses of [[log_server]] where the repository runs, and restart the bridge there;"
    " a log server that was removed is replaced once another one is free"
)
_WAIT: Final = "it is being synchronized; tuskline log status shows its lag; if this lasts, the log server's output names the cause"


@dataclass(frozen=True, slots=True)
class StreamReplicas:
    """The replicas of one stream. `wanted`: how many should be in sync. `unlike`: addresses that are not configured."""

    stream: str
    wanted: int
    places: tuple[ReplicaPlace, ...]
    unlike: tuple[str, ...] = ()

    @property
    def in_sync(self) -> int:
        """How many are in sync."""
        return sum(place.in_sync for place in self.places)

    @property
    def missing(self) -> int:
        """How many should be in sync and are not."""
        return max(self.wanted - self.in_sync, 0)

    def problems(self) -> Iterator[str]:
        """Where its replicas are and should not be, as sentences."""
        for address in self.unlike:
            yield f"log: stream {self.stream} has a replica at {address}, which no [[log_server]] names; {_NAME}"

    def degraded(self) -> Iterator[str]:
        """What is less safe than it should be, as sentences."""
        if self.missing:
            short = f"stream {self.stream} has {self.in_sync} of {self.wanted} replicas in sync"
            yield f"log: {short}" + (f"; {_ADD}" if len(self.places) < self.wanted else "")
        for place in self.places:
            if not place.in_sync:
                where = f"log: the replica of stream {self.stream} at {place.address or place.log_server}"
                yield f"{where} is not in sync{_cause(place)}"


def _cause(place: ReplicaPlace) -> str:
    if not place.answers:
        if place.failure is not None:
            return f", and its log server is not accepted: {place.failure.sentence}"
        return f", and its log server does not answer; {_START}"
    if place.failure is not None:
        return f", and could not be synchronized: {place.failure.sentence}; it is tried again"
    return f"; {_WAIT}"


def of_streams(
    streams: Iterable[StreamDescription],
    replicas: int | None,
    configured: Collection[str] | None = None,
) -> tuple[StreamReplicas, ...]:
    """All streams. `replicas`: how many each is to have; None: as many as it was assigned.

    `configured`: `host:port` of all log servers; None: unknown.
    """
    return tuple(
        StreamReplicas(
            each.stream,
            replicas or len(each.replicas),
            each.replicas,
            () if configured is None else tuple(_unlike(each.replicas, configured)),
        )
        for each in streams
    )


def _unlike(places: Iterable[ReplicaPlace], configured: Collection[str]) -> Iterator[str]:
    for place in places:
        if place.address.rpartition("://")[2] not in configured:
            yield place.address or place.log_server
