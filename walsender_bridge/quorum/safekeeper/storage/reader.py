"""Reads the WAL of a safekeeper's folder from another process, whether the safekeeper runs or not. Writes nothing.

Invariant: bytes are returned only from a file that still had its name after they were read: a segment is renamed before
it is overwritten. What a running safekeeper truncates or removes meanwhile appears as missing, never as other WAL.
"""

from collections.abc import Mapping
from pathlib import Path

from walsender_bridge.errors import CorruptError, TrimmedError
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.postgres.protocol.wal_page import (
    PAGE_BYTES,
    parse_segment_name,
    segment_start,
)
from walsender_bridge.quorum.safekeeper.storage.segments import PARTIAL

_WINDOW = 1 << 20
_ATTEMPTS = 3


class WalReader:
    """See the module. `begin_lsn`, `end_lsn`: the contiguous segments up to the newest.

    The end is that of the newest file, not of the WAL in it. Raises `CorruptError` for a segment of another size.
    """

    def __init__(self, folder: Path, segment_bytes: int) -> None:
        self.folder = folder
        self.segment_bytes = segment_bytes
        self._window: tuple[Lsn, bytes] = (-1, b"")
        self._names: Mapping[Lsn, str] = {}
        self.refresh()

    def refresh(self) -> None:
        """List the segments that exist now."""
        found: dict[Lsn, tuple[int, str]] = {}
        for path in self.folder.iterdir() if self.folder.exists() else ():
            place = parse_segment_name(path.name.removesuffix(PARTIAL), self.segment_bytes)
            if place is None:
                continue
            timeline, start = place
            # The newer timeline's file begins with a copy of the older one's.
            if start not in found or found[start][0] <= timeline:
                found[start] = timeline, path.name
        self._names = {start: name for start, (_, name) in found.items()}
        self._window = (-1, b"")
        begin = end = max(self._names, default=0)
        while begin - self.segment_bytes in self._names:
            begin -= self.segment_bytes
        self.begin_lsn = begin
        self.end_lsn = end + self.segment_bytes if self._names else 0

    def complete(self) -> dict[str, Path]:
        """The completely durable segments, by name."""
        return {
            name: self.folder / name for name in self._names.values() if not name.endswith(PARTIAL)
        }

    def complete_to(self, lsn: Lsn) -> Lsn:
        """The end of the completely durable segments from that of `lsn` on; `lsn`, if its own is not."""
        start = segment_start(lsn, self.segment_bytes)
        while not self._names.get(start, PARTIAL).endswith(PARTIAL):
            start += self.segment_bytes
        return max(lsn, start)

    def name_of(self, lsn: Lsn) -> str:
        """The file that has the byte at `lsn`."""
        return self._names.get(segment_start(lsn, self.segment_bytes), "no segment")

    def read(self, lsn: Lsn, length: int) -> bytes:
        """Bytes of one segment, fewer at its end. Raises `TrimmedError` when it is missing, `CorruptError`."""
        start = segment_start(lsn, self.segment_bytes)
        for _ in range(_ATTEMPTS):
            name = self._names.get(start)
            if name is None:
                break
            path = self.folder / name
            try:
                with path.open("rb") as file:
                    file.seek(lsn - start)
                    data = file.read(min(length, start + self.segment_bytes - lsn))
                    if file.seek(0, 2) != self.segment_bytes:
                        raise CorruptError(
                            f"segment has {file.tell()} bytes, not {self.segment_bytes}",
                            where=str(path),
                        )
                path.stat()
                return data
            except FileNotFoundError:
                # It became complete, or was removed.
                self.refresh()
        raise TrimmedError(f"WAL at {format_lsn(lsn)} is not available", where=str(self.folder))

    def page(self, lsn: Lsn) -> bytes:
        """The page at `lsn`, for `wal_record`; empty if there is none."""
        base = lsn - lsn % _WINDOW
        if self._window[0] != base:
            try:
                self._window = base, self.read(base, _WINDOW)
            except TrimmedError:
                return b""
        return self._window[1][lsn - base : lsn - base + PAGE_BYTES]
