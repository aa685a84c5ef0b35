"""Up to where a safekeeper's segments are in its archive: written by the archiver, read by the hot loop's horizon.

It may be lost or damaged: then nothing counts as archived, and the archive itself is asked, segment by segment.
"""

from walsender_bridge.errors import CorruptError
from walsender_bridge.safekeeper import record_file
from walsender_bridge.safekeeper.disk import Disk

NAME = "archived"
MAGIC = b"TUSKARCH"
FORMAT = 1


def load(disk: Disk, url: str) -> int:
    """The LSN below which every segment is in the archive at `url`; 0: nothing is known."""
    if NAME not in disk.names():
        return 0
    try:
        _, record = record_file.unpack(record_file.read_whole(disk, NAME), MAGIC, FORMAT)
        return int(record["lsn"]) if record["url"] == url else 0
    except (CorruptError, KeyError):
        return 0


def save(disk: Disk, url: str, lsn: int) -> None:
    """Replace the file, durably. Raises `OSError`."""
    record_file.replace(disk, NAME, record_file.pack(MAGIC, FORMAT, {"url": url, "lsn": lsn}))
