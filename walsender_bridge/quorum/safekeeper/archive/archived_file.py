"""The record of what is in a safekeeper's archive: written by the archiver, read for the hot loop's horizon.

It may be lost or damaged: then nothing counts as archived, and the archive is checked segment by segment.
"""

from dataclasses import dataclass

from walsender_bridge.errors import CorruptError
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.runtime import json_model, record_file
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


@dataclass(frozen=True, slots=True)
class _Stored:
    url: str
    lsn: Lsn
    missing: tuple[tuple[Lsn, Lsn], ...] = ()
    mark: str = ""


def load(disk: Disk, url: str, *, mine: bool = False) -> Archived:
    """What is in the archive at `url`. `mine`: the caller writes the file; a damaged one is renamed."""
    if NAME not in disk.names():
        return Archived()
    try:
        _, record = record_file.unpack(record_file.read_whole(disk, NAME), MAGIC, FORMAT)
        stored = json_model.from_plain(_Stored, record)
    except (CorruptError, ValueError):
        if mine:
            record_file.keep_aside(disk, NAME)
        return Archived()
    return Archived(stored.lsn, stored.missing, stored.mark) if stored.url == url else Archived()


def save(disk: Disk, url: str, archived: Archived) -> None:
    """Replace the file, durably. Raises `OSError`."""
    stored = _Stored(url, archived.lsn, archived.missing, archived.mark)
    record_file.replace(disk, NAME, record_file.pack(MAGIC, FORMAT, json_model.plain(stored)))
