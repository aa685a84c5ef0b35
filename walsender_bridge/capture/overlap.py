"""Verifies the transactions that a session sends again against the log: is this the log's own history?

A copy of a cluster that continued independently has the log's system identifier and timeline, and once its WAL
has passed the log's end, no position distinguishes it from the original. Its own transactions below that end
would be skipped as known, or confirmed unread. But the slot's position determines which transactions the server
sends again, and the log determines what they must be:

                    slot          log's last       confirmed_to
                     |  known ones  |  T    |  nothing   |  new transactions
    server sends:    +--------------+-------+------------+------------------>

- a transaction that ends where T ends is T (its commit time proves it), and the server cannot pass that point
  without sending T;
- between T and `confirmed_to` there is no published change: the log was committed up to there;
- until the server has passed both, nothing is appended, and the slot's confirmed position does not move.

In one WAL every transaction of the log lies before T, so receiving T again is sufficient. A slot that is
confirmed to `confirmed_to` sends none of this again; what it sends next follows a position that the log
itself allowed it to be confirmed to. A session that breaks halfway has changed nothing: the next one starts
at the same place.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Self

from walsender_bridge.errors import DivergedError
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn


@dataclass(slots=True)
class Overlap:
    """The log's last transaction, by its end LSN and commit time, and the position of the slot.

    `reach`: the greater of that end LSN and `confirmed_to`. `seen`: the server has sent that transaction.
    `done`: the verification is complete.
    """

    end_lsn: Lsn = 0
    commit_time: int = 0
    reach: Lsn = 0
    slot_lsn: Lsn = 0
    seen: bool = field(init=False)
    done: bool = field(init=False)

    def __post_init__(self) -> None:
        self.seen = self.slot_lsn >= self.end_lsn
        self.done = self.slot_lsn >= self.reach

    @classmethod
    def of(cls, end_lsn: Lsn, commit_time: int, confirmed_to: Lsn, slot_lsn: Lsn) -> Self:
        """The overlap to verify for a session that starts at `slot_lsn`."""
        return cls(end_lsn, commit_time, max(end_lsn, confirmed_to), slot_lsn)

    def confirmable(self, lsn: Lsn) -> Lsn:
        """Return `lsn` if the slot may be confirmed to it already, otherwise the slot's position."""
        return lsn if self.done else min(lsn, self.slot_lsn)

    def skipped(self, end_lsn: Lsn, commit_time: int) -> None:
        """Verify a transaction at or below the log's end. Raises `DivergedError` if the log has a different one there."""
        if end_lsn != self.end_lsn:
            return
        if commit_time != self.commit_time:
            raise self._diverged(f"a different one ends there, committed {utc(commit_time)}")
        self.seen = True
        self.done = self.end_lsn >= self.reach

    def passed(self, lsn: Lsn) -> None:
        """Note that everything that ends at or before `lsn` has been sent. Raises `DivergedError`."""
        if self.done:
            return
        if not self.seen and lsn >= self.end_lsn:
            raise self._diverged(f"the server reached {format_lsn(lsn)} without sending it")
        self.done = lsn >= self.reach

    def taken(self, final_lsn: Lsn) -> None:
        """Check a transaction with changes that the log does not have; its commit record starts at `final_lsn`.

        Raises `DivergedError` if the log should have it.
        """
        if final_lsn < self.reach:
            raise self._diverged(
                f"the transaction at {format_lsn(final_lsn)} is missing from the log, which is complete up "
                f"to {format_lsn(self.reach)}"
            )

    def _diverged(self, reason: str) -> DivergedError:
        return DivergedError(
            f"the log ends with the transaction at {format_lsn(self.end_lsn)}, committed "
            f"{utc(self.commit_time)}, but the server's history does not match: {reason}. The server is "
            "a copy, or was restored from one, and continued independently",
            where="walsender",
            repair="nothing was skipped; correct the DSN to name the server that the log was written from, or run "
            "`tuskline reattach --force` to start over from this server, which brings its tables level",
        )


_EPOCH = datetime(1970, 1, 1)  # the zone is written behind it


def utc(microseconds: int) -> str:
    """A commit time, for messages."""
    try:
        moment = _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        # No server's clock produces this, but the bytes come from outside.
        return f"{microseconds} microseconds after 1970"
    return f"{moment.isoformat(' ', 'microseconds')} UTC"
