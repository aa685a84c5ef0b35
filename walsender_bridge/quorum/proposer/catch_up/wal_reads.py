"""Reads of WAL that is not in the queue, from the primary or a safekeeper: for laggards, catch-up and comparisons.

The primary's WAL comes from `primary_wal.py`, a safekeeper's as the answer to `Fetch`, in the order of the requests.
"""

from collections.abc import Callable
from functools import partial

from walsender_bridge.errors import MalformedMessageError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.quorum.proposer import effects as e
from walsender_bridge.quorum.proposer.catch_up.comparison import Comparison
from walsender_bridge.quorum.proposer.catch_up.feed import CatchUpFeed
from walsender_bridge.quorum.proposer.catch_up.primary_wal import PrimaryWalReader, WalRange
from walsender_bridge.quorum.proposer.links import SafekeeperLink
from walsender_bridge.quorum.protocol import messages as m


class WalReads:
    """See the module. `handle` takes the results; `send` queues a message and returns the link, if there is one.

    `feed` takes what was read for catch-up. `term`: of the election; safekeepers answer the leader only.
    """

    def __init__(
        self,
        primary_wal: PrimaryWalReader,
        handle: Callable[[e.WalRead | e.WalCompared], None],
        send: Callable[[int, m.Fetch], SafekeeperLink | None],
        term: Callable[[], int],
        feed: CatchUpFeed,
    ) -> None:
        self._primary_wal = primary_wal
        self._feed = feed
        self._handle = handle
        self._send = send
        self._term = term
        #: Bytes of the last `WalRead` for each safekeeper, and their LSN.
        self._pending: dict[int, tuple[Lsn, memoryview]] = {}
        self._comparison = Comparison()

    def read(self, wanted: e.ReadWal) -> None:
        """Read a range; the result is the event `WalRead`."""
        if wanted.source == e.WalSource.PRIMARY:
            self._ask_primary(wanted)
        else:
            assert wanted.donor is not None, wanted
            self._fetch(wanted.donor, wanted)

    def compare(self, wanted: e.CompareWal) -> None:
        """Compare a range; the result is the event `WalCompared`."""
        self._fetch(wanted.peer, wanted)
        self._ask_primary(wanted)

    def hand(self, peer: int, begin: Lsn, end: Lsn) -> memoryview:
        """The bytes of the last `WalRead` for a safekeeper; they are returned once."""
        start, data = self._pending.pop(peer)
        return data[begin - start : end - start]

    def fetched(self, link: SafekeeperLink, message: m.Fetched, body: memoryview) -> None:
        """A piece of WAL requested from a safekeeper. Empty: the safekeeper no longer holds it.

        Raises `MalformedMessageError`.
        """
        if not link.fetches:
            raise MalformedMessageError("unrequested WAL", where=link.end.where)
        wanted = link.fetches[0]
        link.fetched += body
        if message.length and len(link.fetched) < wanted.end_lsn - wanted.begin_lsn:
            return
        link.fetches.popleft()
        data, link.fetched = bytes(link.fetched), bytearray()
        if len(data) != wanted.end_lsn - wanted.begin_lsn:
            self.failed(wanted)
        elif isinstance(wanted, e.ReadCatchUpWal):
            self._feed.was_read(wanted, data)
        elif isinstance(wanted, e.CompareWal):
            self._compared(wanted, self._comparison.safekeeper_has(wanted, data))
        else:
            self._in_hand(wanted, data)

    def failed(
        self, wanted: e.ReadWal | e.CompareWal | e.ReadCatchUpWal, *, removed: bool = False
    ) -> None:
        """A range is unavailable from its source. `removed`: the primary has removed it."""
        if isinstance(wanted, e.ReadCatchUpWal):
            self._feed.was_read(wanted, b"")
            return
        if isinstance(wanted, e.CompareWal):
            self._comparison.failed(wanted)
            self._handle(e.WalCompared(wanted.peer, wanted.end_lsn, None, removed))
        else:
            self._in_hand(wanted, b"")

    def _fetch(self, peer: int, wanted: e.ReadWal | e.CompareWal) -> None:
        link = self._send(peer, m.Fetch(self._term(), wanted.begin_lsn, wanted.end_lsn))
        if link is None:
            self.failed(wanted)
        else:
            link.fetches.append(wanted)

    def _ask_primary(self, wanted: e.ReadWal | e.CompareWal) -> None:
        came = partial(self._primary_has, wanted)
        self._primary_wal.ask(wanted.peer, WalRange(wanted.begin_lsn, wanted.end_lsn, came))

    def _primary_has(self, wanted: e.ReadWal | e.CompareWal, data: bytes | None) -> None:
        if isinstance(wanted, e.ReadWal):
            self._in_hand(wanted, data or b"")
        elif data:
            self._compared(wanted, self._comparison.primary_has(wanted, data))
        else:
            self.failed(wanted, removed=data is None)

    def _compared(self, wanted: e.CompareWal, equal: bool | None) -> None:
        if equal is not None:
            self._handle(e.WalCompared(wanted.peer, wanted.end_lsn, equal))

    def _in_hand(self, read: e.ReadWal, data: bytes) -> None:
        self._pending[read.peer] = read.begin_lsn, memoryview(data)
        self._handle(e.WalRead(read.peer, read.begin_lsn, read.begin_lsn + len(data)))
