"""What the sources publish, asked beside the writer's loop: a server that hangs keeps no other source waiting.

Each source has at most one question under way, and each question ends by itself (`sources.look`).
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import structlog

from spark_consumers.lakehouse.shape import Look
from spark_consumers.lakehouse.sources import Source, look
from walsender_bridge.errors import TusklineError

#: Seconds between two questions to a source.
LOOK_SECONDS = 5.0
#: Seconds that the loop waits for the answers: a server that runs needs a few milliseconds.
_PATIENCE = 1.0

log = structlog.get_logger()


class Looks:
    """See the module. Used by one thread."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = {source.stream: source for source in sources}
        self._pool = ThreadPoolExecutor(max(len(sources), 1), thread_name_prefix="look")
        self._asked: dict[str, tuple[float, Future[Look]]] = {}
        self._asked_at = float("-inf")

    def answers(
        self,
        streams: Collection[str],
        known: Callable[[str], Collection[int]],
        *,
        at_once: bool = False,
    ) -> Iterator[tuple[str, float, Look]]:
        """What sources have answered, and since when it holds (monotonic seconds).

        Asks these streams' sources when it is time, or `at_once`. `known`: see `sources.look`, by stream.
        """
        now = time.monotonic()
        if at_once or now - self._asked_at >= LOOK_SECONDS:
            self._asked_at = now
            for stream in streams:
                if stream not in self._asked:
                    question = self._pool.submit(look, self._sources[stream], known(stream))
                    self._asked[stream] = now, question
            # One that is under way for longer hangs: it is not waited for each time.
            wait([asked for began, asked in self._asked.values() if began == now], _PATIENCE)
        for stream in [stream for stream, (_, asked) in self._asked.items() if asked.done()]:
            began, asked = self._asked.pop(stream)
            try:
                yield stream, began, asked.result()
            except TusklineError as error:
                log.warning("publication not seen", stream=stream, error=str(error))

    def soon(self) -> None:
        """Ask at the next look, whenever the last one was."""
        self._asked_at = float("-inf")

    def close(self) -> None:
        """Ask no more; a question that is under way ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
