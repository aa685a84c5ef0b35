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
#: shape; 8 the writer of each link, the row index of each table, and deletion vectors; 9 pins, and links that have what
#: differs from another one; 10 runs of the row index that name partitions; 11 columns of data files that are known by their numbers alone;
#: 12 views; 13 change feeds, and tables that keep deleted rows; 14 names of tables in the lake, and where histories begin.
FORMAT_VERSION = 14
#: The member that has the CRC32C of all others, and the format that brought it.
_CRC = "crc"
_SEALED_FROM = 3
#: What is before the checksum, at the end of a file.
_SEAL = b', "crc": '

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
    return sealed(record)[0]


def sealed(record: dict[str, Any]) -> tuple[bytes, int]:
    """The file of a record, and its checksum."""
    content = json.dumps(record).encode()
    crc = _crc(content)
    return b"%s%s%d}" % (content[:-1], _SEAL, crc), crc


def is_sealed(content: bytes, crc: int) -> bool:
    """Whether this is the file of a record, whole, whose checksum is this one (`sealed`)."""
    members, _, stated = content.rpartition(_SEAL)
    return stated == b"%d}" % crc and _crc(members + b"}") == crc


def _crc(content: bytes) -> int:
    crc: int = google_crc32c.value(content)
    return crc


def load(store: LakeStore, name: str) -> dict[str, Any]:
    """The record of this name. Raises `CorruptError` for another content, `FileNotFoundError`."""
    return parse(store.read(name), store.where(name))


def parse(content: bytes, where: str) -> dict[str, Any]:
    """The record in a file's content; `where` names the file. Raises `CorruptError`."""
    return parse_sealed(content, where)[0]


def parse_sealed(content: bytes, where: str) -> tuple[dict[str, Any], int | None]:
    """As `parse`, with the checksum that the file states."""
    try:
        record = json.loads(content)
    except ValueError as error:
        raise CorruptError(f"not JSON: {error}", where=where, repair=REPAIR) from None
    if not isinstance(record, dict):
        raise CorruptError("not an object", where=where, repair=REPAIR)
    version = record.get("format_version")
    version = version if isinstance(version, int) else 0
    needs_seal = version >= _SEALED_FROM
    checksum = record.pop(_CRC, None)
    # A later format may be sealed otherwise.
    if (
        version <= FORMAT_VERSION
        and (needs_seal or checksum is not None)
        and checksum != _crc_of(content, record)
    ):
        raise CorruptError(
            "its content does not match its checksum (CRC32C)", where=where, repair=REPAIR
        )
    return record, checksum


def _crc_of(content: bytes, record: dict[str, Any]) -> int:
    """The checksum of a file's members; formats before 9 wrote them in another layout than the one that it is of."""
    members, found, _ = content.rpartition(_SEAL)
    return _crc(members + b"}") if found else _crc(json.dumps(record).encode())
