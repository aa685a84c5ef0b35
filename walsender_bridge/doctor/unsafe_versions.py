"""Minor versions of PostgreSQL with a fault that touches logical decoding, from its release notes.

A fault is listed by the first minor of each major that has it mended; a major that is not listed never had
it. Only what can lose, tear or stop a stream is here.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Fault:
    """`mended`: major to the first good minor. `since`: major to the first bad one (0 unless given)."""

    reason: str
    mended: dict[int, int]
    since: dict[int, int]

    def in_version(self, number: int) -> bool:
        """Whether the server with this version number (160014 is 16.14) has it."""
        major, minor = divmod(number, 10_000)
        return major in self.mended and self.since.get(major, 0) <= minor < self.mended[major]


FAULTS: Final = (
    Fault(
        "a slot may start inside a transaction, and send the rest of it as if it were whole",
        {12: 20, 13: 16, 14: 13, 15: 8, 16: 4},
        {},
    ),
    Fault(
        "changes of transactions that were open while ALTER PUBLICATION ran may not be sent",
        {13: 21, 14: 18, 15: 13, 16: 9, 17: 5},
        {},
    ),
    Fault(
        "decoding may stop with 'invalid memory alloc request size' where many transactions run beside DDL",
        {13: 22, 14: 19, 15: 14, 16: 10, 17: 6},
        {13: 21, 14: 18, 15: 13, 16: 9, 17: 5},
    ),
    Fault(
        "CREATE INDEX CONCURRENTLY and REINDEX CONCURRENTLY may leave rows out of an index: a unique key, "
        "and with it a replica identity, may hold a key twice",
        {14: 4},
        {},
    ),
)


def faults_of(number: int) -> list[str]:
    """The reasons against a server's version number."""
    return [fault.reason for fault in FAULTS if fault.in_version(number)]
