"""WAL that a proposer asks a safekeeper for: checked, read, and handed out in the order of the questions.

**What is lent is what was received.** Of a complete segment whose sum is recorded (`checksums`), no byte is handed out
before all of it was read and has that sum: whoever gets it keeps a sum of its own of it, and would serve damage as sound. A
segment with another sum, or one that cannot be read, is `damaged`, and answered for as one that is not held.

**Nobody waits for it.** The check is done in small parts, between two looks at the network.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Final

import google_crc32c
import structlog

from walsender_bridge.errors import TrimmedError
from walsender_bridge.postgres.protocol.wal_page import segment_start
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.frames import MAX_WAL_BYTES
from walsender_bridge.quorum.safekeeper.effects import SendWal
from walsender_bridge.quorum.safekeeper.storage.segments import PIECE_BYTES, SegmentFile
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage

_FETCHED_BYTES = MAX_WAL_BYTES // 2
#: Segments that are remembered as checked: a segment is asked for in pieces, by several at once.
_REMEMBERED = 8
#: Questions of one connection that wait here.
_MOST_ASKED = 64
_DONE: Final = False

_log = structlog.get_logger(__name__)

#: The connection, the frame, and the bytes behind it.
Piece = tuple[int, m.Fetched, bytes]


class Lending:
    """See the module; beside a `WalStorage`, in the same thread."""

    def __init__(self, storage: WalStorage) -> None:
        self._storage = storage
        #: By the connection: what it asked for, and the work at the first of it.
        self._wanted: dict[int, deque[SendWal]] = {}
        self._work: dict[int, Iterator[Piece | None]] = {}
        self._term = 0
        #: By name, with the sum that is recorded.
        self._sound: dict[str, int] = {}
        self._damaged: dict[str, int | None] = {}

    @property
    def damaged(self) -> list[str]:
        """The segments that were found to be damaged and are here still."""
        here = {file.name for file in self._storage.segments.all()}
        recorded = self._storage.sums.get
        self._damaged = {n: s for n, s in self._damaged.items() if n in here and recorded(n) == s}
        return sorted(self._damaged)

    def is_full(self, conn: int) -> bool:
        """Whether a connection has asked for enough: it is read no further until it has been answered."""
        return len(self._wanted.get(conn, ())) >= _MOST_ASKED

    def busy(self, crowded: Callable[[int], bool]) -> bool:
        """Whether `step` has something to do. `crowded`: whether a connection has enough to send already."""
        return any(not crowded(conn) for conn in self._wanted)

    def ask(self, wanted: SendWal) -> None:
        """To be answered after what this connection asked before."""
        self._wanted.setdefault(wanted.conn, deque()).append(wanted)

    def forget(self, conn: int) -> None:
        """The connection is gone."""
        self._wanted.pop(conn, None)
        self._work.pop(conn, None)

    def step(self, term: int, crowded: Callable[[int], bool]) -> Iterator[Piece]:
        """What can be sent now, in `term`; a small part of a check may come first."""
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
        """The pieces of one range; None: more is to be read first. An empty one: it is not held."""
        lsn = wanted.begin_lsn
        while lsn < wanted.end_lsn:
            data = b""
            # What another term has cut may lie there again with other bytes.
            if (yield from self._is_sound(lsn)) and wanted.term == self._term:
                data = self._read(lsn, min(_FETCHED_BYTES, wanted.end_lsn - lsn))
            yield wanted.conn, m.Fetched(wanted.term, lsn, len(data)), data
            if not data:
                return
            lsn += len(data)

    def _file(self, lsn: int) -> SegmentFile | None:
        storage = self._storage
        return storage.segments.at(segment_start(lsn, storage.format.segment_bytes))

    def _is_sound(self, lsn: int) -> Generator[None, None, bool]:
        """Whether the segment may be lent. One that is not complete, or whose sum was lost, is lent as it is."""
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
                return False  # it was removed, or cut, since the last part
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

    def _read(self, lsn: int, length: int) -> bytes:
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
            "a segment is damaged and is not lent to other safekeepers",
            segment=name,
            reason=why,
            repair="let the safekeeper join as a new member; see what happened to its disk",
        )
        return False
