"""A few threads that run actions on the slots of one standby, at most one action for each slot at a time.

Submitting does not block, and actions start in the order in which they were submitted. An action that hangs, for
`sessions.ACTION_SECONDS` at most, or longer by the WAL that it reads, occupies one worker and delays nothing else; the
next action on its slot is queued behind the others.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime.closing import Closing

#: Concurrent actions. Each is a session of the standby, and mostly keeps one backend busy.
WORKERS: Final = 4

Work = Callable[[], None]


class KeyedWorkerPool(Closing):
    """Workers that end at `close`, or with the process. `name`: the standby's, for the names of the threads."""

    def __init__(self, name: str, *, workers: int = WORKERS) -> None:
        self._queue: queue.SimpleQueue[tuple[str, Work] | None] = queue.SimpleQueue()
        self._workers = workers
        self._closed = False
        self._changed = threading.Condition()
        #: By slot: when its action was submitted, in monotonic seconds.
        self._busy: dict[str, float] = {}
        #: By slot: the result of an action that has ended and was not reported yet.
        self._ended: dict[str, TusklineError | None] = {}
        for number in range(workers):
            threading.Thread(target=self._work, name=f"slots-{name}-{number}", daemon=True).start()

    def submit(self, slot: str, work: Work) -> bool:
        """Queue `work` on the slot; False if other work on it has not ended. `work` raises `TusklineError`s only."""
        with self._changed:
            if slot in self._busy:
                return False
            self._busy[slot] = time.monotonic()
        self._queue.put((slot, work))
        return True

    def busy(self) -> dict[str, float]:
        """The slots with an action that is queued or running, and for how many seconds it has been."""
        now = time.monotonic()
        with self._changed:
            return {slot: now - since for slot, since in self._busy.items()}

    def ended(self) -> dict[str, TusklineError | None]:
        """The results since the last call, by slot: None is success."""
        with self._changed:
            ended, self._ended = self._ended, {}
            return ended

    def wait(self, seconds: float) -> bool:
        """Wait until no action is left, for `seconds` at most; returns whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, seconds)

    def close(self) -> None:
        """Have each worker end after its current action; queued ones are not started. Does not wait."""
        with self._changed:
            self._closed = True
        for _ in range(self._workers):
            self._queue.put(None)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            slot, work = item
            if self._closed:
                return
            error: TusklineError | None = None
            try:
                work()
            except TusklineError as raised:
                error = raised
            except Exception as raised:
                error = TusklineError(f"{type(raised).__name__}: {raised}", where=slot)
            with self._changed:
                del self._busy[slot]
                self._ended[slot] = error
                self._changed.notify_all()
