"""Small durable files with integrity checks: a JSON object with its checksum as a member.

`crc32c` is the CRC-32C of the JSON of all other members. A file is replaced atomically and durably, so it has the old or the
new content; the reader rejects a damaged one, or renames it (`record_file.keep_aside`). An operator can read the file,
and write one by hand without the checksum where the reader allows that.

Files that need not survive a crash are written by `status_file`. `record_file` is the format of the files beside
a safekeeper's WAL, which are verified before they are parsed, and are written through a simulated disk in tests.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import google_crc32c

from walsender_bridge.runtime.durable import replace_file

_CRC: Final = "crc32c"


def save(path: Path, record: Mapping[str, Any], *, mode: int = 0o666) -> None:
    """Replace the file durably. `mode`: of a new file, less the process's umask. Raises `OSError`."""
    replace_file(path, sealed(record), mode=mode)


def load(path: Path, *, checked: bool = True) -> dict[str, Any]:
    """Load the record of a file. Raises `OSError` and the errors of `opened`."""
    return opened(path.read_bytes(), checked=checked)


def sealed(record: Mapping[str, Any]) -> bytes:
    """The file content for a record."""
    return json.dumps({**record, _CRC: crc_of(record)}).encode()


def opened(content: bytes, *, checked: bool = True) -> dict[str, Any]:
    """The record in a file's content, without its checksum. `checked`: the checksum is mandatory, not just verified if present.

    Raises `ValueError` or `TypeError` for a damaged file.
    """
    try:
        record = json.loads(content)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    if not isinstance(record, dict):
        raise TypeError("not a JSON object")
    found = record.pop(_CRC, None)
    if (found is not None or checked) and found != crc_of(record):
        raise ValueError("its checksum does not match")
    return record


def crc_of(record: Mapping[str, Any]) -> int:
    """CRC32C of the record's JSON, its members in their order."""
    return int(google_crc32c.value(json.dumps(record).encode()))
