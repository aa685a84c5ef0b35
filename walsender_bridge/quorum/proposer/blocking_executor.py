"""Runs calls that may wait for a server on a thread, so that no commit waits: connecting, queries, advancing a slot.

Invariant: `then` is called on the loop's thread, by `serve`, in the order in which the work was submitted, and never
after `close`, which closes the results that are left. An unexpected error is raised by `serve`, too: it ends the whole
process, which is restarted, rather than the thread alone, for whose results the proposer would wait forever.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime.closing import Closing
from walsender_bridge.runtime.waker import Waker

_T = TypeVar("_T")
#: Seconds that `close` waits for the current call.
_CLOSE_SECONDS = 2.0


class BlockingExecutor:
    """See the module. When `waker` is readable, `serve` may have results."""

    def __init__(self, waker: Waker) -> None:
        self._waker = waker
        self._closed = threading.Event()
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Callable[[Any], None]] | None] = (
            queue.SimpleQueue()
        )
        self._done: queue.SimpleQueue[tuple[Callable[[Any], None], Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="blocking-executor", daemon=True)
        self._thread.start()

    def ask(self, work: Callable[[], _T], then: Callable[[_T | TusklineError], None]) -> None:
        """Run `work` after the calls submitted before; `then` gets its result, or the error."""
        self._work.put((work, then))

    def serve(self) -> None:
        """Deliver the results."""
        while not self._done.empty():
            then, result = self._done.get()
            if isinstance(result, Exception) and not isinstance(result, TusklineError):
                raise result
            then(result)

    def close(self) -> None:
        """End the thread; waits briefly for the current call."""
        self._closed.set()
        self._work.put(None)
        self._thread.join(_CLOSE_SECONDS)
        while not self._done.empty():
            _discard(self._done.get()[1])

    def _run(self) -> None:
        while (asked := self._work.get()) is not None:
            work, then = asked
            result: Any
            try:
                result = work()
            except Exception as error:  # `serve` raises it
                result = error
            if self._closed.is_set():
                _discard(result)
                return
            self._done.put((then, result))
            self._waker.wake()


def _discard(result: object) -> None:
    if isinstance(result, Closing):
        result.close()
