"""What a session sends again, held against what the log holds: is this the log's own history?

A copy of a cluster that ran on by itself has the log's system identifier and timeline, and once its WAL
has passed the log's end no position tells it from the original. Its own transactions below that end
would be skipped as known ones, or confirmed unread. But the slot's position says what the server has to
send again, and the log says what that must be:

                    slot          log's last       confirmed_to
                     |  known ones  |  T    |  nothing   |  new transactions
    server sends:    +--------------+-------+------------+------------------>

- a transaction that ends where T ends is T (its commit time says so), and nothing passes T unseen;
- between T and `confirmed_to` there is no published change: the log was committed up to there;
- until the server has passed both, nothing is appended, and the slot is confirmed to no more than it was.

On one WAL every transaction of the log lies before T, so seeing T again is enough. A slot that is
confirmed to the end of all this sends nothing again; what follows then follows a position that the log
itself let it be confirmed to. A session that breaks in the middle changed nothing: the next one begins
at the same place.
"""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Self

from walsender_bridge.errors import DivergedError
from walsender_bridge.postgres.protocol.lsn import format_lsn


@dataclass(slots=True)
class Overlap:
    """The log's last transaction, by its end LSN and commit time, and the position of the slot.

    `reach`: the greater of that end LSN and `confirmed_to`. `seen`: the server has that transaction.
    `done`: there is no more doubt.
    """

    end_lsn: int = 0
    commit_time: int = 0
    reach: int = 0
    slot_lsn: int = 0
    seen: bool = field(init=False)
    done: bool = field(init=False)

    def __post_init__(self) -> None:
        self.seen = self.slot_lsn >= self.end_lsn
        self.done = self.slot_lsn >= self.reach

    @classmethod
    def of(cls, end_lsn: int, commit_time: int, confirmed_to: int, slot_lsn: int) -> Self:
        """What a session from `slot_lsn` must show."""
        return cls(end_lsn, commit_time, max(end_lsn, confirmed_to), slot_lsn)

    def confirmable(self, lsn: int) -> int:
        """`lsn`, if the slot may be confirmed to it already; else where the slot is."""
        return lsn if self.done else min(lsn, self.slot_lsn)

    def skipped(self, end_lsn: int, commit_time: int) -> None:
        """A transaction that the log has was sent again. Raises `DivergedError` if it is another one."""
        if end_lsn != self.end_lsn:
            return
        if commit_time != self.commit_time:
            raise self._diverged(f"another one ends there, committed {utc(commit_time)}")
        self.seen = True
        self.done = self.end_lsn >= self.reach

    def passed(self, lsn: int) -> None:
        """Everything that ends at or before `lsn` has been sent. Raises `DivergedError`."""
        if self.done:
            return
        if not self.seen and lsn >= self.end_lsn:
            raise self._diverged(f"the server came to {format_lsn(lsn)} without it")
        self.done = lsn >= self.reach

    def taken(self, final_lsn: int) -> None:
        """A transaction that the log does not have brings a change; its commit record starts there.

        Raises `DivergedError` if it is one of those that the log should have.
        """
        if final_lsn < self.reach:
            raise self._diverged(
                f"a transaction at {format_lsn(final_lsn)} is not in the log, which has everything up "
                f"to {format_lsn(self.reach)}"
            )

    def _diverged(self, reason: str) -> DivergedError:
        return DivergedError(
            f"the log ends with the transaction at {format_lsn(self.end_lsn)}, committed "
            f"{utc(self.commit_time)}, and the server's history does not fit it: {reason}. The server is "
            "a copy, or was restored from one, and ran on by itself",
            where="walsender",
            repair="nothing was skipped; name the server that the log was written from in the DSN, or "
            "`tuskline reattach --force` begins again from the server as it is now, with a new copy of its tables",
        )


_EPOCH = datetime(1970, 1, 1)  # the zone is written behind it


def utc(microseconds: int) -> str:
    """A commit time, for messages."""
    try:
        moment = _EPOCH + timedelta(microseconds=microseconds)
    except OverflowError:
        # No server's clock says so; but the bytes are not ours.
        return f"{microseconds} microseconds after 1970"
    return f"{moment.isoformat(' ', 'microseconds')} UTC"
