"""What may wait for a server is done on a thread, so that no commit waits for it: to connect, to ask, to move a slot.

Invariant: `then` is called on the loop's thread, by `serve`, in the order in which the work was asked for, and never
after `close`. What was made for nobody any more is closed. An error that nobody foresaw is raised there, too: it ends
the process, which is started again, and not the thread alone, for whose answers the proposer would wait for ever.
"""

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime.closing import Closing
from walsender_bridge.runtime.waker import Waker

_T = TypeVar("_T")
#: Seconds that `close` waits for the work at hand.
_CLOSE_SECONDS = 2.0


class BlockingExecutor:
    """See the module. When `waker` is readable, `serve` may have something to do."""

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
        """Have `work` done after what was asked before; `then` gets what it returns, or the error."""
        self._work.put((work, then))

    def serve(self) -> None:
        """Hand over what is done."""
        while not self._done.empty():
            then, result = self._done.get()
            if isinstance(result, Exception) and not isinstance(result, TusklineError):
                raise result
            then(result)

    def close(self) -> None:
        """End the thread; waits for the work at hand for a moment."""
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
            except Exception as error:  # `serve` raises what is no answer
                result = error
            if self._closed.is_set():
                _discard(result)
                return
            self._done.put((then, result))
            self._waker.wake()


def _discard(result: object) -> None:
    if isinstance(result, Closing):
        result.close()
