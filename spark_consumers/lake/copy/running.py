"""Running copies: a few at a time, in the background of epochs; each table is handed over when it is complete.

The pipeline starts copies (`start`) and takes their results (`finished`) in its own loop; nothing here writes to
the chain. A copy that the pipeline no longer wants when it is complete is removed (`discard`): no manifest has
ever named it.
"""

import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from spark_consumers.lake.copy.bootstrap import Copied, CopyRequest, TableCopier
from spark_consumers.lake.copy.initial_copy import CopyProgress
from spark_consumers.lake.manifest.chain import TableVersion
from spark_consumers.lake.status import CopyStatus
from spark_consumers.lake.tables.states import stream_of
from walsender_bridge.errors import (
    ConnectionFailedError,
    DeadlineError,
    TusklineError,
    UnavailableError,
    UnsupportedByCatalogError,
)

#: Snapshots that are read at the same time: a small table need not wait for a large one.
_AT_ONCE = 2
#: Errors that are no table's: the copy is tried again by itself.
_OF_OTHERS = UnavailableError | ConnectionFailedError | DeadlineError | UnsupportedByCatalogError


@dataclass(frozen=True)
class NotBegun:
    """A copy that could not begin for a reason other than the table: for example, the server does not answer."""

    reason: TusklineError


Result = Copied | NotBegun


class Copies:
    """The copies of one writer. `close` stops running copies, between two parts of a table."""

    def __init__(self, copier: TableCopier) -> None:
        self._copier = copier
        self._pool = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="copy")
        self._done: SimpleQueue[tuple[str, Result]] = SimpleQueue()
        self._progress: dict[str, CopyProgress] = {}
        self._unwanted: set[str] = set()
        #: By name: the folder of a copy that ended to be wanted with its first chunk, so that no link has named it.
        self._unnamed: dict[str, str] = {}
        #: By name: the folder of a table that is brought level, and is in the lake already.
        self._leveled: dict[str, str] = {}

    def start(self, request: CopyRequest) -> None:
        """Copy these tables, none of which is being copied."""
        names = {f"{request.source.stream}.{relation}" for relation in request.tables}
        assert not names & set(self._progress)
        self._progress |= {name: CopyProgress() for name in names}
        self._leveled |= {name: request.levels[name].path for name in names & set(request.levels)}
        self._pool.submit(self._run, request, names)

    def _run(self, request: CopyRequest, names: set[str]) -> None:
        left = set(names)

        def deliver(name: str, result: Result) -> None:
            if not _is_partial(result):
                left.discard(name)
            self._done.put((name, result))

        try:
            self._copier.copy(request, deliver, {name: self._progress[name] for name in names})
        except Exception as error:
            failure = (
                error if isinstance(error, TusklineError) else UnavailableError(str(error)[:500])
            )
            of_others = isinstance(failure, _OF_OTHERS)
            for name in sorted(left):
                deliver(name, NotBegun(failure) if of_others else failure)

    def finished(self) -> Iterator[tuple[str, Result]]:
        """The results of copies since the last call (`Copied`). A copy that could not begin is `NotBegun`."""
        while True:
            try:
                name, result = self._done.get_nowait()
            except Empty:
                return
            if _is_partial(result):
                if name not in self._unwanted:
                    yield name, result
                elif isinstance(result, TableVersion) and len(result.chunks) == 1:
                    self._unnamed[name] = result.path
                continue
            del self._progress[name]
            if name in self._unwanted:
                self._unwanted.discard(name)
                self.discard(result)
                if (path := self._unnamed.pop(name, None)) is not None:
                    self._copier.remove(path)
                result = None
            yield name, result

    def discard(self, result: Result) -> None:
        """Remove a copy that no link names. One of chunks may be named by earlier links, and goes with them; so is one that was brought level."""
        if isinstance(result, TableVersion) and not (
            result.chunks or result.path in self._leveled.values()
        ):
            self._copier.remove(result.path)

    def drop(self, name: str) -> None:
        """Discard the result of this table's copy, if it is being copied."""
        if name in self._progress:
            self._unwanted.add(name)
            self._progress[name].is_unwanted = True

    def leveled(self, names: Collection[str]) -> set[str]:
        """The folders of those of these tables that are, or were last, brought level."""
        return {self._leveled[name] for name in names if name in self._leveled}

    @property
    def running(self) -> set[str]:
        """The tables that are being copied, or wait for their turn."""
        return set(self._progress)

    def of_stream(self, stream: str) -> bool:
        """Whether a table of the stream is being copied."""
        return any(stream_of(name) == stream for name in self._progress)

    def status(self) -> dict[str, CopyStatus]:
        """The progress of each table, by name."""
        now = time.time()
        return {name: progress.status(now) for name, progress in sorted(self._progress.items())}

    def close(self) -> None:
        """Stop running copies, and wait for them."""
        self._copier.stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)


def _is_partial(result: Result) -> bool:
    """Whether more of the table is still to come."""
    return isinstance(result, TableVersion) and result.is_partial
