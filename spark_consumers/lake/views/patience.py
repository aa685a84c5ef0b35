"""When a view whose query has failed is tried again. Pure.

Tables wait for their lake's views: one round stages both. So what a view costs them is bounded, whatever its query does:

- an attempt ends after the view's `timeout`;
- after an attempt of more than five seconds that failed, the view waits nine times as long as that took (an hour at most), so it takes a tenth
  of the time, and more only if an attempt lasts for more than 400 seconds. After a shorter one it does not wait: the next epoch may have the
  rows with which the query succeeds, and perhaps no other epoch follows for long;
- a failure that is not the query's own (no memory, no disk) makes the round fail, since it may be the tables' next; but of one view only
  twice in a row;
- a query that ended the whole process (the JVM had no memory) is known by its record, which an attempt has once it has lasted a while and
  removes at its end. After three such ends the view waits an hour before each attempt.

Waiting, a view is stale: never wrong.
"""

from dataclasses import dataclass
from typing import Final

#: Failures in a row, and ends of the process, at which the tables do not wait any more.
FAILURES: Final = 3
#: Seconds of the longest wait.
LONGEST: Final = 3600.0
#: Seconds of an attempt after which there is no wait.
_SHORT: Final = 5.0
#: The part of the time that a failing view takes is one in this many, as long as `LONGEST` does not shorten the wait.
_SHARE: Final = 10


@dataclass(frozen=True, slots=True)
class Failed:
    """What is known of a view that has failed. `until`: when it is tried again; `count`: failures in a row that made the round fail."""

    reason: str
    until: float
    count: int = 0


def failed(
    before: Failed | None, reason: str, now: float, took: float, *, of_query: bool
) -> Failed:
    """After one more attempt, which took so many seconds. `of_query`: the failure is the query's own, so the round goes on."""
    count = 0 if of_query else (before.count if before else 0) + 1
    wait = min((_SHARE - 1) * took, LONGEST) if took > _SHORT else 0.0
    return Failed(reason, now + wait if of_query or count >= FAILURES else now, count)


def ended(deaths: int, began: float) -> Failed | None:
    """What is known of a view in whose attempts the process has ended so often, by a process that began at `began`."""
    if deaths < FAILURES:
        return None
    reason = f"its query ended the driver {deaths} times, as happens if memory is insufficient"
    return Failed(reason, began + LONGEST, FAILURES)
