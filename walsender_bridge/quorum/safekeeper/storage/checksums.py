"""The CRC-32C of each complete segment, taken from the bytes as they were received, to detect later damage.

    sums    "000000010000000000000003 1A2B3C4D" per line, in the folder of the segments; the last line of a name counts

It is computed over the bytes in memory, never over what is read back, so it does not cover up changes on the disk.
Lines are appended without a sync: a lost line leaves a segment unverified, with no other effect. But a line never
outlives its subject: before a segment is truncated, its line is removed, durably.
"""

import contextlib

from walsender_bridge.runtime import record_file
from walsender_bridge.runtime.folder import Disk

NAME = "sums"
_LARGEST = 64 << 20


def read(disk: Disk) -> dict[str, int]:
    """The checksums by the segments' names. Raises `OSError`."""
    return parse(disk.read(NAME, 0, _LARGEST)) if NAME in disk.names() else {}


def parse(content: bytes) -> dict[str, int]:
    """The checksums in a file's content; invalid lines are ignored."""
    found = {}
    for line in content.decode("ascii", "replace").splitlines():
        name, _, value = line.partition(" ")
        if len(name) == 24 and len(value) == 8:
            with contextlib.suppress(ValueError):
                found[name] = int(value, 16)
    return found


class SegmentSums:
    """The checksums as the safekeeper, their only writer, keeps them."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._sums: dict[str, int] = {}
        self._length = 0

    def get(self, name: str) -> int | None:
        """The checksum of one segment; None: unknown."""
        return self._sums.get(name)

    def keep(self, names: set[str]) -> None:
        """Load the file, and keep the lines of these segments only, durably. Raises `OSError`."""
        stored = read(self._disk)
        self._sums = {name: crc for name, crc in stored.items() if name in names}
        if stored != self._sums or NAME not in self._disk.names():
            record_file.replace(self._disk, NAME, self._text(self._sums))
        self._length = self._disk.size(NAME)

    def add(self, name: str, crc: int) -> None:
        """Record a complete segment. A disk too full for a line is no error."""
        line = self._text({name: crc})
        with contextlib.suppress(OSError):
            file = self._disk.open(NAME, durable=False)
            try:
                file.write(line, self._length)
            finally:
                file.close()
            self._length += len(line)
            self._sums[name] = crc

    @staticmethod
    def _text(sums: dict[str, int]) -> bytes:
        return "".join(f"{name} {crc:08X}\n" for name, crc in sums.items()).encode()
