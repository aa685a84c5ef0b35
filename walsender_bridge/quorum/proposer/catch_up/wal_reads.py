"""WAL that is not in the queue: ranges from the primary or another safekeeper, for those that lack them and to compare.

The primary's come through `primary_wal.py`, a safekeeper's as the answer to `Fetch`, in the order of the questions.
"""

from collections.abc import Callable
from functools import partial

from walsender_bridge.errors import MalformedMessageError
from walsender_bridge.quorum.proposer import effects as e
from walsender_bridge.quorum.proposer.catch_up.comparison import Comparison
from walsender_bridge.quorum.proposer.catch_up.feed import CatchUpFeed
from walsender_bridge.quorum.proposer.catch_up.primary_wal import PrimaryWalReader, WalRange
from walsender_bridge.quorum.proposer.links import SafekeeperLink
from walsender_bridge.quorum.protocol import messages as m


class WalReads:
    """See the module. `handle` takes the answers; `send` queues a message and gives the link, if there is one.

    `feed` takes those that were read for it.

    `term`: of the election; only the leader is answered.
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
        #: Bytes of the last `WalRead` for each safekeeper, and where they begin.
        self._pending: dict[int, tuple[int, memoryview]] = {}
        self._comparison = Comparison()

    def read(self, wanted: e.ReadWal) -> None:
        """Have `WalRead` told of a range."""
        if wanted.source == e.WalSource.PRIMARY:
            self._ask_primary(wanted)
        else:
            assert wanted.donor is not None, wanted
            self._fetch(wanted.donor, wanted)

    def compare(self, wanted: e.CompareWal) -> None:
        """Have `WalCompared` told of a range."""
        self._fetch(wanted.peer, wanted)
        self._ask_primary(wanted)

    def hand(self, peer: int, begin: int, end: int) -> memoryview:
        """The bytes that the last `WalRead` brought for a safekeeper; they are given once."""
        start, data = self._pending.pop(peer)
        return data[begin - start : end - start]

    def fetched(self, link: SafekeeperLink, message: m.Fetched, body: memoryview) -> None:
        """A piece of what was asked of a safekeeper. An empty one: it does not hold it any more.

        Raises `MalformedMessageError`.
        """
        if not link.fetches:
            raise MalformedMessageError("WAL that nobody asked for", where=link.end.where)
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
        """A range cannot be had from there. `removed`: the primary has it no more."""
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
