"""Minor versions of PostgreSQL with a bug that affects logical decoding, from its release notes.

A bug is listed with the first minor of each major that fixes it; a major that is not listed never had it. Only bugs that
can lose changes, split a transaction or stop a stream are here.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Fault:
    """`fixed_in`: the first fixed minor by major. `since`: the first affected minor by major (0 unless given)."""

    reason: str
    fixed_in: dict[int, int]
    since: dict[int, int]

    def in_version(self, number: int) -> bool:
        """Whether a server with this version number (160014 is 16.14) has the bug."""
        major, minor = divmod(number, 10_000)
        return major in self.fixed_in and self.since.get(major, 0) <= minor < self.fixed_in[major]


FAULTS: Final = (
    Fault(
        "a slot may start inside a transaction, and send its remainder as if it were the whole transaction",
        {12: 20, 13: 16, 14: 13, 15: 8, 16: 4},
        {},
    ),
    Fault(
        "changes of transactions that were open while ALTER PUBLICATION ran may not be sent",
        {13: 21, 14: 18, 15: 13, 16: 9, 17: 5},
        {},
    ),
    Fault(
        "decoding may stop with 'invalid memory alloc request size' if many transactions run concurrently with DDL",
        {13: 22, 14: 19, 15: 14, 16: 10, 17: 6},
        {13: 21, 14: 18, 15: 13, 16: 9, 17: 5},
    ),
    Fault(
        "CREATE INDEX CONCURRENTLY and REINDEX CONCURRENTLY may omit rows from an index: a unique key, "
        "and thus a replica identity, may contain duplicates",
        {14: 4},
        {},
    ),
)


def faults_of(number: int) -> list[str]:
    """The bugs of a server's version."""
    return [fault.reason for fault in FAULTS if fault.in_version(number)]
