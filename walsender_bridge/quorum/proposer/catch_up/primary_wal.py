"""Reads WAL that has left the queue from the primary, for laggards and comparisons, beside the stream of new WAL.

Each safekeeper for which WAL is read has a connection of its own, on which the server sends ahead, so the next range has
arrived when it is requested. The blocking executor opens it; the loop's own epoll serves it.

Invariant: a reader buffers at most `_AHEAD_BYTES` and one receive buffer: beyond that its connection is not polled, so
the server waits and memory stays bounded.
"""

import select
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from walsender_bridge.errors import SlotError, TusklineError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.quorum.proposer.blocking_executor import BlockingExecutor
from walsender_bridge.quorum.proposer.effects import Lineage
from walsender_bridge.quorum.proposer.primary.facts import PrimaryStream
from walsender_bridge.quorum.proposer.primary.wal_stream import WalStream
from walsender_bridge.runtime import logs

#: Seconds without a byte after which a range counts as unavailable.
_PATIENCE_SECONDS = 30.0
#: Seconds after which an idle reader is closed. While it holds a walsender back, a server that shuts down waits for that
#: walsender before it ends any stream (WalSndWaitStopping), so the shutdown would go unnoticed.
_IDLE_SECONDS = 2.0
_AHEAD_BYTES = 2 << 20
_NAME = "tuskline-catch-up"

_log = logs.logger()


@dataclass(frozen=True, slots=True)
class WalRange:
    """A request for the bytes of [begin_lsn, end_lsn): `then` gets them, or b"" when they are unavailable.

    None when the server has removed them.
    """

    begin_lsn: Lsn
    end_lsn: Lsn
    then: Callable[[bytes | None], None]


class _WalReader:
    """One connection: the bytes of `[at, at + len(held))` are buffered."""

    def __init__(self) -> None:
        self.stream: WalStream | None = None
        self.opening = False
        self.polled = False
        self.wanted: deque[WalRange] = deque()
        self.held = bytearray()
        self.at = 0
        self.since = time.monotonic()


class PrimaryWalReader:
    """See the module. Call `serve(descriptor)` when `poll` reports it readable, and `tick` periodically."""

    def __init__(
        self, dsn: str, lineage: Lineage, executor: BlockingExecutor, poll: select.epoll
    ) -> None:
        self._dsn = dsn
        self._lineage = lineage
        self._executor = executor
        self._poll = poll
        self._readers: dict[int, _WalReader] = {}
        self._by_fd: dict[int, _WalReader] = {}
        #: The reason of the last failure: it is logged once.
        self._told = ""

    def ask(self, peer: int, wanted: WalRange) -> None:
        """Read a range for a safekeeper, after the ranges requested for it before."""
        reader = self._readers.setdefault(peer, _WalReader())
        reader.wanted.append(wanted)
        reader.since = time.monotonic()
        self._go_on(reader)

    def owns(self, descriptor: int) -> bool:
        """Whether the descriptor is one of these connections."""
        return descriptor in self._by_fd

    def serve(self, descriptor: int) -> None:
        """Something has arrived."""
        reader = self._by_fd[descriptor]
        assert reader.stream is not None
        try:
            for piece in reader.stream.pieces():
                reader.held += piece
                reader.since = time.monotonic()
            reader.stream.flush()
        except TusklineError as error:
            self._failed(reader, error.what, removed=isinstance(error, SlotError))
            return
        self._go_on(reader)

    def tick(self) -> None:
        """Fail ranges that do not arrive, and close idle readers."""
        now = time.monotonic()
        for peer, reader in list(self._readers.items()):
            if reader.opening:
                continue
            if reader.wanted and now - reader.since > _PATIENCE_SECONDS:
                self._failed(reader, "the server sends no data")
            elif not reader.wanted and now - reader.since > _IDLE_SECONDS:
                self._forget(reader)
                del self._readers[peer]

    def close(self) -> None:
        """Close the connections."""
        for reader in self._readers.values():
            self._forget(reader)

    # -- inside -------------------------------------------------------------------------------------

    def _go_on(self, reader: _WalReader) -> None:
        """Deliver what has arrived; request the rest."""
        while reader.wanted and not reader.opening:
            wanted = reader.wanted[0]
            if reader.stream is None or not reader.at <= wanted.begin_lsn <= self._end(reader):
                self._open(reader, wanted.begin_lsn)
                return
            del reader.held[: wanted.begin_lsn - reader.at]
            reader.at = wanted.begin_lsn
            length = wanted.end_lsn - wanted.begin_lsn
            if len(reader.held) < length:
                break
            data = bytes(memoryview(reader.held)[:length])
            del reader.held[:length]
            reader.at += length
            reader.wanted.popleft()
            wanted.then(data)
        self._listen(reader)

    def _end(self, reader: _WalReader) -> Lsn:
        return reader.at + len(reader.held)

    def _listen(self, reader: _WalReader) -> None:
        """Poll it, unless enough is buffered."""
        if reader.stream is None:
            return
        wants_more = bool(reader.wanted) or len(reader.held) < _AHEAD_BYTES
        if wants_more != reader.polled:
            reader.polled = wants_more
            self._poll.modify(reader.stream, select.EPOLLIN if wants_more else 0)

    def _open(self, reader: _WalReader, lsn: Lsn) -> None:
        self._forget(reader)
        reader.opening = True

        def opened(connection: PrimaryStream | TusklineError) -> None:
            reader.opening = False
            if isinstance(connection, TusklineError):
                self._failed(reader, connection.what)
                return
            try:
                lineage = self._lineage
                timeline = lineage.timeline_at(lsn)
                reader.stream = WalStream(connection, lsn, timeline, lineage.timeline)
            except TusklineError as error:
                connection.close()
                self._failed(reader, error.what)
                return
            reader.at = lsn
            reader.since = time.monotonic()
            reader.polled = True
            self._by_fd[reader.stream.fileno()] = reader
            self._poll.register(reader.stream, select.EPOLLIN)
            self._go_on(reader)

        self._executor.ask(lambda: PrimaryStream.connect(self._dsn, application_name=_NAME), opened)

    def _failed(self, reader: _WalReader, reason: str, *, removed: bool = False) -> None:
        """The current range is unavailable; the ones behind it are requested on a new connection."""
        if reason != self._told:
            self._told = reason
            _log.warning("could not read WAL from the primary", reason=reason)
        self._forget(reader)
        reader.since = time.monotonic()
        if reader.wanted:
            reader.wanted.popleft().then(None if removed else b"")
        self._go_on(reader)

    def _forget(self, reader: _WalReader) -> None:
        if reader.stream is not None:
            del self._by_fd[reader.stream.fileno()]
            self._poll.unregister(reader.stream)
            reader.stream.close()
            reader.stream = None
        reader.held.clear()
