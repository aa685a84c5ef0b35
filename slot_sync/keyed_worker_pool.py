"""Work on the slots of one standby, a few pieces at a time, and never two on the same slot.

Whoever gives work is not held up by it, and what was given first is begun first. So a slot on which work hangs, which
each piece does for `sessions.ACTION_SECONDS` at most, or longer by the WAL that it reads, holds up one of the workers and nobody else; it comes after the
others when it is given work again.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Final

from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime.closing import Closing

#: Pieces at a time. Each is a session of the standby, and mostly one process of it at work.
WORKERS: Final = 4

Work = Callable[[], None]


class KeyedWorkerPool(Closing):
    """Workers that end at `close`, or with the process. `name`: of the standby, for their threads."""

    def __init__(self, name: str, *, workers: int = WORKERS) -> None:
        self._given: queue.SimpleQueue[tuple[str, Work] | None] = queue.SimpleQueue()
        self._workers = workers
        self._closed = False
        self._changed = threading.Condition()
        #: By slot: when the work on it was given, in monotonic seconds.
        self._busy: dict[str, float] = {}
        #: By slot: how the work on it ended that nobody has been told of.
        self._ended: dict[str, TusklineError | None] = {}
        for number in range(workers):
            threading.Thread(target=self._work, name=f"slots-{name}-{number}", daemon=True).start()

    def give(self, slot: str, work: Work) -> bool:
        """Have `work` done on the slot; False if there is still other work on it. It raises `TusklineError`s only."""
        with self._changed:
            if slot in self._busy:
                return False
            self._busy[slot] = time.monotonic()
        self._given.put((slot, work))
        return True

    def busy(self) -> dict[str, float]:
        """The slots that are worked on, or wait for it, and for how many seconds."""
        now = time.monotonic()
        with self._changed:
            return {slot: now - since for slot, since in self._busy.items()}

    def ended(self) -> dict[str, TusklineError | None]:
        """How work ended since this was asked last, by slot: None is well."""
        with self._changed:
            ended, self._ended = self._ended, {}
            return ended

    def wait(self, seconds: float) -> bool:
        """Wait until no work is left, `seconds` at most; whether none is."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, seconds)

    def close(self) -> None:
        """Have each worker end after what it does now; what is behind it is not begun. Nobody is waited for."""
        with self._changed:
            self._closed = True
        for _ in range(self._workers):
            self._given.put(None)

    def _work(self) -> None:
        while (given := self._given.get()) is not None:
            slot, work = given
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
