"""WAL that a proposer requests from a safekeeper: verified, read, and sent in the order of the requests.

**Only WAL as it was received is sent.** No byte of a complete segment with a recorded checksum (`checksums`) is sent
before the whole segment was read and its checksum matches: the receiver computes its own checksum of it, and would serve
damage as valid. A segment with another checksum, or an unreadable one, is `damaged`, and treated as not held.

**No commit waits for it.** The check is done in small parts, between two polls of the network.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Final

import google_crc32c

from walsender_bridge.errors import TrimmedError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.wal_page import segment_start
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.frames import MAX_WAL_BYTES
from walsender_bridge.quorum.safekeeper.effects import SendWal
from walsender_bridge.quorum.safekeeper.storage.segments import PIECE_BYTES, SegmentFile
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage
from walsender_bridge.runtime import logs

_FETCHED_BYTES = MAX_WAL_BYTES // 2
#: The most segments that are remembered as verified: a segment is requested in pieces, by several at once.
_REMEMBERED = 8
#: The most pending requests of one connection.
_MOST_ASKED = 64
_DONE: Final = False

_log = logs.logger()

#: The connection, the frame, and the bytes that follow it.
Piece = tuple[int, m.Fetched, bytes]


class Lending:
    """See the module; used with a `WalStorage`, in the same thread."""

    def __init__(self, storage: WalStorage) -> None:
        self._storage = storage
        #: By the connection: its requests, and the work on the first of them.
        self._wanted: dict[int, deque[SendWal]] = {}
        self._work: dict[int, Iterator[Piece | None]] = {}
        self._term = 0
        #: By name, with the recorded checksum.
        self._sound: dict[str, int] = {}
        self._damaged: dict[str, int | None] = {}

    @property
    def damaged(self) -> list[str]:
        """The segments that were found damaged and still exist."""
        here = {file.name for file in self._storage.segments.all()}
        recorded = self._storage.sums.get
        self._damaged = {n: s for n, s in self._damaged.items() if n in here and recorded(n) == s}
        return sorted(self._damaged)

    def is_full(self, conn: int) -> bool:
        """Whether a connection has its limit of requests: no more input is read until they are answered."""
        return len(self._wanted.get(conn, ())) >= _MOST_ASKED

    def busy(self, crowded: Callable[[int], bool]) -> bool:
        """Whether `step` has something to do. `crowded`: whether a connection has too much unsent output."""
        return any(not crowded(conn) for conn in self._wanted)

    def ask(self, wanted: SendWal) -> None:
        """Queue a request, behind the earlier ones of its connection."""
        self._wanted.setdefault(wanted.conn, deque()).append(wanted)

    def forget(self, conn: int) -> None:
        """The connection is closed."""
        self._wanted.pop(conn, None)
        self._work.pop(conn, None)

    def step(self, term: int, crowded: Callable[[int], bool]) -> Iterator[Piece]:
        """The pieces that can be sent now, in `term`; may do a small part of a check first."""
        self._term = term
        for conn, wanted in list(self._wanted.items()):
            while wanted and not crowded(conn):
                work = self._work.setdefault(conn, self._lent(wanted[0]))
                piece = next(work, _DONE)
                if piece is None:
                    break
                if isinstance(piece, tuple):
                    yield piece
                else:
                    del self._work[conn]
                    wanted.popleft()
            if not wanted:
                self.forget(conn)

    def _lent(self, wanted: SendWal) -> Iterator[Piece | None]:
        """The pieces of one range; None: more must be read first. An empty one: it is not held."""
        lsn = wanted.begin_lsn
        while lsn < wanted.end_lsn:
            data = b""
            # What another term has truncated may have been replaced by other bytes.
            if (yield from self._is_sound(lsn)) and wanted.term == self._term:
                data = self._read(lsn, min(_FETCHED_BYTES, wanted.end_lsn - lsn))
            yield wanted.conn, m.Fetched(wanted.term, lsn, len(data)), data
            if not data:
                return
            lsn += len(data)

    def _file(self, lsn: Lsn) -> SegmentFile | None:
        storage = self._storage
        return storage.segments.at(segment_start(lsn, storage.format.segment_bytes))

    def _is_sound(self, lsn: Lsn) -> Generator[None, None, bool]:
        """Whether the segment may be sent. An incomplete one, or one without a recorded checksum, is sent unverified."""
        file, sums = self._file(lsn), self._storage.sums
        if file is None:
            return True
        name, recorded = file.name, sums.get(file.name)
        if name in self._damaged and self._damaged[name] == recorded:
            return False
        if recorded is None or self._sound.get(name) == recorded:
            return True
        found = 0
        for at in range(0, file.segment_bytes, PIECE_BYTES):
            if self._file(lsn) != file or sums.get(name) != recorded:
                return False  # it was removed, or truncated, since the last part
            try:
                piece = self._storage.segments.disk.read(name, at, PIECE_BYTES)
            except OSError as error:
                return self._is_damaged(name, str(error))
            found = google_crc32c.extend(found, piece)
            yield None
        if found != recorded:
            return self._is_damaged(name, f"its checksum is {found:08X}, not {recorded:08X}")
        while len(self._sound) >= _REMEMBERED:
            del self._sound[next(iter(self._sound))]
        self._sound[name] = recorded
        return True

    def _read(self, lsn: Lsn, length: int) -> bytes:
        try:
            return self._storage.read(lsn, length)
        except TrimmedError:
            return b""
        except OSError as error:
            file = self._file(lsn)
            assert file is not None, "it was read"
            self._is_damaged(file.name, str(error))
            return b""

    def _is_damaged(self, name: str, why: str) -> bool:
        self._damaged[name] = self._storage.sums.get(name)
        _log.error(
            "segment is damaged and is not sent to other safekeepers",
            segment=name,
            reason=why,
            repair="rejoin the safekeeper as a new member, and check its disk",
        )
        return False
