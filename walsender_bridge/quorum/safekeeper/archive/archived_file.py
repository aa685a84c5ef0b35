"""The record of what is in a safekeeper's archive: written by the archiver, read for the hot loop's horizon.

It may be lost or damaged: then nothing counts as archived, and the archive is checked segment by segment.
"""

from dataclasses import dataclass

from walsender_bridge.errors import CorruptError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.runtime import record_file
from walsender_bridge.runtime.folder import Disk

NAME = "archived"
MAGIC = b"TUSKARCH"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Archived:
    """What is in the archive. `lsn`: every segment below is; 0: unknown.

    Except `missing`: [begin, end) of WAL that was removed here before it was archived, and is not there. `mark`: the id of
    that archive, or that nothing was archived yet (`mark.py`); empty in files of earlier versions.
    """

    lsn: Lsn = 0
    missing: tuple[tuple[Lsn, Lsn], ...] = ()
    mark: str = ""


def load(disk: Disk, url: str, *, mine: bool = False) -> Archived:
    """What is in the archive at `url`. `mine`: the caller writes the file; a damaged one is renamed."""
    if NAME not in disk.names():
        return Archived()
    try:
        _, record = record_file.unpack(record_file.read_whole(disk, NAME), MAGIC, FORMAT)
        if record["url"] != url:
            return Archived()
        missing = tuple((int(begin), int(end)) for begin, end in record.get("missing", ()))
        return Archived(int(record["lsn"]), missing, str(record.get("mark", "")))
    except (CorruptError, KeyError):
        if mine:
            record_file.keep_aside(disk, NAME)
        return Archived()


def save(disk: Disk, url: str, archived: Archived) -> None:
    """Replace the file, durably. Raises `OSError`."""
    missing = [list(each) for each in archived.missing]
    record = {"url": url, "lsn": archived.lsn, "missing": missing, "mark": archived.mark}
    record_file.replace(disk, NAME, record_file.pack(MAGIC, FORMAT, record))
