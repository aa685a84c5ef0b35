"""Rereads complete segments, one after another, and verifies the checksums taken at their receipt (`checksums`).

Invariant: a segment is reported as damaged only if its file still had its name, and its checksum was still the same,
after it was read: the hot loop may rename a segment and overwrite it, or truncate it, at any moment. Nothing here
writes. Damaged WAL is refused to readers (`WalFolder.damaged`); the other safekeepers have intact copies.
"""

import time
from typing import Final

import google_crc32c

from walsender_bridge.quorum.safekeeper.storage import checksums as segment_sums
from walsender_bridge.quorum.wal_server.wal_folder import WalFolder
from walsender_bridge.runtime import logs

#: Seconds between reads of two segments, and until a segment is read again.
STEP_SECONDS: Final = 1.0
AGAIN_SECONDS: Final = 24 * 3600.0
_PIECE_BYTES: Final = 1 << 20

_log = logs.logger()


class Scrub:
    """See the module. `step` blocks: call it on a thread."""

    def __init__(self, folder: WalFolder) -> None:
        self._folder = folder
        self._read_at: dict[str, float] = {}

    def step(self) -> bool:
        """Read the segment that has waited longest, if one is due; returns whether there was one. Raises `OSError`."""
        sums = self._sums()
        self._read_at = {name: at for name, at in self._read_at.items() if name in sums}
        self._folder.damaged &= sums.keys()
        now = time.monotonic()
        due = [n for n in sums if now - self._read_at.get(n, -AGAIN_SECONDS) >= AGAIN_SECONDS]
        if not due:
            return False
        name = min(due, key=lambda each: (self._read_at.get(each, 0.0), each))
        self._read_at[name] = now
        self._check(name, sums[name])
        return True

    def _check(self, name: str, received: int) -> None:
        path, found = self._folder.path / name, 0
        try:
            inode = path.stat().st_ino
            with path.open("rb") as file:
                while piece := file.read(_PIECE_BYTES):
                    found = google_crc32c.extend(found, piece)
            same = path.stat().st_ino == inode and self._sums().get(name) == received
        except FileNotFoundError:
            return
        if same and found != received:
            _log.error(
                "segment is damaged and will not be served",
                segment=name,
                crc=f"{found:08X}",
                received=f"{received:08X}",
                repair="rejoin the safekeeper as a new member, and check its disk",
            )
            self._folder.damaged.add(name)

    def _sums(self) -> dict[str, int]:
        try:
            return segment_sums.parse((self._folder.path / segment_sums.NAME).read_bytes())
        except FileNotFoundError:
            return {}
