"""What the sources publish, asked beside the writer's loop: a server that hangs keeps no other source waiting.

Each source has at most one question under way, and each question ends by itself (`published`).
"""

import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import structlog

from spark_consumers.lakehouse.sources import Source, published
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
        self._asked: dict[str, Future[set[str]]] = {}
        self._asked_at = float("-inf")

    def answers(self, streams: Collection[str]) -> Iterator[tuple[str, set[str]]]:
        """The published tables of sources that have answered; asks these streams' sources when it is time."""
        now = time.monotonic()
        if now - self._asked_at >= LOOK_SECONDS:
            self._asked_at = now
            for stream in streams:
                if stream not in self._asked:
                    self._asked[stream] = self._pool.submit(published, self._sources[stream])
            wait(self._asked.values(), _PATIENCE)
        for stream in [stream for stream, look in self._asked.items() if look.done()]:
            try:
                yield stream, self._asked.pop(stream).result()
            except TusklineError as error:
                log.warning("publication not seen", stream=stream, error=str(error))

    def soon(self) -> None:
        """Ask at the next look, whenever the last one was."""
        self._asked_at = float("-inf")

    def close(self) -> None:
        """Ask no more; a question that is under way ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
