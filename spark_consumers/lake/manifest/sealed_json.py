"""The lake's own records, each a JSON object with the checksum of its members.

Not `runtime.checksummed_json`: a link of the chain is made exclusively, never replaced, and its format is that of lakes.
"""

import json
from typing import Any

import google_crc32c

from spark_consumers.lake.store.lake_store import LakeStore
from walsender_bridge.errors import CorruptError, LakeError

#: 2 brought tables that do not follow, copies beside their tables, and answers to requests; 3 a checksum in each file;
#: 4 the steady time in each link, and the shape of each table at its source; 5 the log that a link is of;
#: 6 other names for what is quarantined; 7 another name for tables that were not copied, and output functions in a table's
#: shape; 8 the writer of each link, the row index of each table, and deletion vectors; 9 pins.
FORMAT_VERSION = 9
#: The member that has the CRC32C of all others, and the format that brought it.
_CRC = "crc"
_SEALED_FROM = 3

REPAIR = (
    "restore the file from a backup; or, if it is in _tuskline/epochs and there is no backup, move it away: its epoch is lost, "
    "and the lake continues with the others"
)


def unreadable(where: str, error: OSError) -> LakeError:
    """A lake's file or folder that this user cannot read, or that is something else."""
    return LakeError(
        f"the lake cannot be read: {error.strerror}",
        where=where,
        repair="specify the folder that `tuskline lake run` writes, which this user must be able to read",
    )


def dump(record: dict[str, Any]) -> bytes:
    """The file of a record."""
    return json.dumps({**record, _CRC: _crc(record)}, indent=1).encode()


def _crc(record: dict[str, Any]) -> int:
    crc: int = google_crc32c.value(json.dumps(record).encode())
    return crc


def load(store: LakeStore, name: str) -> dict[str, Any]:
    """The record of this name. Raises `CorruptError` for another content, `FileNotFoundError`."""
    return parse(store.read(name), store.where(name))


def parse(content: bytes, where: str) -> dict[str, Any]:
    """The record in a file's content; `where` names the file. Raises `CorruptError`."""
    try:
        record = json.loads(content)
    except ValueError as error:
        raise CorruptError(f"not JSON: {error}", where=where, repair=REPAIR) from None
    if not isinstance(record, dict):
        raise CorruptError("not an object", where=where, repair=REPAIR)
    version = record.get("format_version")
    version = version if isinstance(version, int) else 0
    sealed = version >= _SEALED_FROM
    checksum = record.pop(_CRC, None)
    # A later format may be sealed otherwise.
    if version <= FORMAT_VERSION and (sealed or checksum is not None) and checksum != _crc(record):
        raise CorruptError(
            "its content does not match its checksum (CRC32C)", where=where, repair=REPAIR
        )
    return record
