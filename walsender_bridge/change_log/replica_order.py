"""Which replica of a stream is tried first, and which error is raised if none of them answers. Pure.

Any replica that is committed up to a reader's end will do, since replicas are equal byte for byte (I3). A replica that failed is
tried last for a while: each attempt at a log server that hangs costs its reader a timeout.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from walsender_bridge.errors import (
    BehindError,
    CorruptError,
    DiskFullError,
    InvalidReplicaError,
    InvariantError,
    TrimmedError,
    TusklineError,
    UnavailableError,
    UnknownStreamError,
)

#: Seconds for which a replica that failed is tried last.
AVOIDED_SECONDS: Final = 300.0
#: The errors that concern one replica: another one may answer.
OF_A_REPLICA: Final = (
    BehindError,
    CorruptError,
    DiskFullError,
    InvalidReplicaError,
    InvariantError,
    TrimmedError,
    UnavailableError,
    UnknownStreamError,
)


def rotated(addresses: Sequence[str], number: int) -> tuple[str, ...]:
    """The order for the range of this number: each range of a stream begins with another replica, so all of them are read."""
    at = number % len(addresses) if addresses else 0
    return (*addresses[at:], *addresses[:at])


def in_order(addresses: Iterable[str], failed: Mapping[str, float], now: float) -> list[str]:
    """The order in which to try: those that have not failed lately as given, then the others, the latest failure last.

    `failed`: the time of the last failure by address; times are monotonic, in seconds.
    """

    def last(address: str) -> float:
        at = failed.get(address, float("-inf"))
        return at if now - at < AVOIDED_SECONDS else float("-inf")

    return sorted(addresses, key=last)


def is_failure(error: TusklineError) -> bool:
    """Whether a replica with this error is tried last from now on. One that has trimmed earlier than others has not failed."""
    return not isinstance(error, TrimmedError)


def decisive(errors: Sequence[TusklineError]) -> TusklineError:
    """Of the errors of all replicas, in the order in which they were tried, the one to raise: the last.

    `TrimmedError` has a reader start again, so it is raised if all replicas that answer have trimmed the entries, and only then.
    """
    answered = [
        e for e in errors if isinstance(e, BehindError) or not isinstance(e, UnavailableError)
    ]
    if answered and all(isinstance(error, TrimmedError) for error in answered):
        return answered[-1]
    return [error for error in errors if not isinstance(error, TrimmedError)][-1]
