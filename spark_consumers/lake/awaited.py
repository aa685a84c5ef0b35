"""Which FLUSH or SYNC of a SQL session is still to be carried out. Pure.

A session that waits (sql/flush/functions.sql) notifies the lake's driver of the ID of its transaction, at first and then once a
second. One round of the driver serves all sessions: it takes a snapshot of the server, then performs `flush` or `sync`, and
reports the snapshot. Why that is safe: a transaction that is visible in the snapshot has written its commit record before the
snapshot was taken, `flush` reads the WAL position later, and everything up to that position is readable when it returns.

A session notifies only when its transaction has committed, so whatever was asked before a round's snapshot is visible in it:
one round is enough, and a notification that names anything else (anyone may notify) causes one round at most, not a loop.
"""

from dataclasses import dataclass
from typing import Final, Self

FLUSH: Final = "flush"
SYNC: Final = "sync"
_KINDS: Final = {FLUSH.encode(): FLUSH, SYNC.encode(): SYNC}
#: Of a transaction ID.
_DIGITS: Final = 18
#: Bytes of a payload that are looked at: one more than the longest request has.
_LONGEST: Final = len(FLUSH) + 1 + _DIGITS + 1


@dataclass(frozen=True, slots=True)
class XidSnapshot:
    """PostgreSQL's `txid_snapshot`: IDs below `xmax` that are not in `running` have ended."""

    xmax: int
    running: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `xmin:xmax:xip,xip`. Raises `ValueError`."""
        _, xmax, running = text.split(":")
        return cls(int(xmax), frozenset(map(int, filter(None, running.split(",")))))

    def has(self, xid: int) -> bool:
        """Whether the transaction had ended."""
        return xid < self.xmax and xid not in self.running


def asked(payload: bytes) -> tuple[str, int] | None:
    """What a notification asks for: `flush 745` or `sync 745`. None if it is not one of ours."""
    kind, _, xid = payload[:_LONGEST].partition(b" ")
    if kind not in _KINDS or not xid.isdigit() or len(xid) > _DIGITS:
        return None
    return _KINDS[kind], int(xid)


def unserved(waiting: frozenset[int], shown: XidSnapshot | None) -> frozenset[int]:
    """Of the transactions that sessions wait for, those that need a round; `shown`: what was reported last on this server."""
    return waiting if shown is None else frozenset(xid for xid in waiting if not shown.has(xid))
