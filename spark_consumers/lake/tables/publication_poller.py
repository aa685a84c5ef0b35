"""Polls the sources' publications beside the writer's loop: a server that hangs delays no other source.

Each source has at most one query under way, and each query has a time limit (`sources.read_again`).
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from spark_consumers.lake.tables import sources
from spark_consumers.lake.tables.shape import Publication
from spark_consumers.lake.tables.sources import Reading, Source
from walsender_bridge.errors import TusklineError, UnavailableError
from walsender_bridge.runtime import logs

#: Seconds between two polls of a source.
POLL_SECONDS = 5.0
#: Seconds that the loop waits for the results: a running server needs a few milliseconds.
_PATIENCE = 1.0
#: Seconds after which a source that cannot be read is reported: until it is, changes that only its catalog shows go
#: undetected.
OVERDUE_SECONDS = 60.0

log = logs.logger()


class PublicationPoller:
    """See the module. Used by one thread."""

    def __init__(
        self, configured: Sequence[Source], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._sources = {source.stream: source for source in configured}
        self._pool = ThreadPoolExecutor(max(len(configured), 1), thread_name_prefix="look")
        self._asked: dict[str, tuple[float, Future[Reading]]] = {}
        self._read: dict[str, Reading] = {}
        self._asked_at = float("-inf")
        #: Since when polls of a stream's source fail (monotonic seconds), and the last error.
        self._failing: dict[str, tuple[float, TusklineError]] = {}

    def answers(
        self,
        streams: Collection[str],
        known: Callable[[str], Collection[int]],
        *,
        at_once: bool = False,
    ) -> Iterator[tuple[str, float, Publication]]:
        """The publications that have been read, and since when they hold (monotonic seconds).

        Polls these streams' sources when it is time, or `at_once`. `known`: see `sources.read_again`, by stream.
        """
        now = self._now()
        if at_once or now - self._asked_at >= POLL_SECONDS:
            self._asked_at = now
            for stream in self._failing.keys() - set(streams):
                del self._failing[stream]
            for stream in streams:
                if stream not in self._asked:
                    last = self._read.get(stream)
                    question = self._pool.submit(
                        sources.read_again, self._sources[stream], known(stream), last
                    )
                    self._asked[stream] = now, question
            # A query that is under way for longer hangs: it is not waited for each time.
            wait([asked for began, asked in self._asked.values() if began == now], _PATIENCE)
        for stream in [stream for stream, (_, asked) in self._asked.items() if asked.done()]:
            began, asked = self._asked.pop(stream)
            try:
                self._read[stream] = asked.result()
            except TusklineError as error:
                log.warning("could not read publication", stream=stream, error=str(error))
                since, _ = self._failing.get(stream, (began, error))
                self._failing[stream] = since, error
                continue
            self._failing.pop(stream, None)
            yield stream, began, self._read[stream].publication

    def overdue(self) -> TusklineError | None:
        """The error of the source that has not been read for longest, if that is too long; its tables continue."""
        if not self._failing:
            return None
        stream, (since, error) = min(self._failing.items(), key=lambda each: each[1][0])
        seconds = self._now() - since
        if seconds < OVERDUE_SECONDS:
            return None
        return UnavailableError(
            f"its tables have not been compared with the server's catalog for {seconds:.0f} s: {error.what}",
            where=f"source {stream}",
            repair=error.repair,
        )

    def soon(self) -> None:
        """Poll at the next call, whenever the last poll was."""
        self._asked_at = float("-inf")

    def close(self) -> None:
        """Stop polling; a query under way ends by itself."""
        self._pool.shutdown(wait=False, cancel_futures=True)
