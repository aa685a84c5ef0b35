"""Small files that must outlive a power cut and be known to be whole: a JSON object with its checksum as a member.

`crc32c` is the CRC-32C of the JSON of all other members. A file is replaced as a whole, durably, so it says the old or the
new; one that is damaged is for its reader to refuse, or to keep aside (`record_file.keep_aside`). An operator can read it,
and write one by hand without the checksum where a reader allows that.

What only has to be whole for readers of now goes through `status_file`. `record_file` is the frame of the files beside
a safekeeper's WAL, which are checked before anything in them is parsed, and are written through a simulated disk in tests.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import google_crc32c

from walsender_bridge.runtime.durable import replace_file

_CRC: Final = "crc32c"


def save(path: Path, record: Mapping[str, Any], *, mode: int = 0o666) -> None:
    """Replace the file, durably. `mode`: of a new one, less the process's umask. Raises `OSError`."""
    replace_file(path, sealed(record), mode=mode)


def load(path: Path, *, checked: bool = True) -> dict[str, Any]:
    """The record in a file; raises `OSError`, and what `opened` raises."""
    return opened(path.read_bytes(), checked=checked)


def sealed(record: Mapping[str, Any]) -> bytes:
    """The file of a record."""
    return json.dumps({**record, _CRC: crc_of(record)}).encode()


def opened(content: bytes, *, checked: bool = True) -> dict[str, Any]:
    """The record in a file, without its checksum. `checked`: one that has none is damaged; else it is taken as it is.

    For damage it raises `ValueError` or `TypeError`.
    """
    record = json.loads(content)
    if not isinstance(record, dict):
        raise TypeError("it is no object")
    told = record.pop(_CRC, None)
    if (told is not None or checked) and told != crc_of(record):
        raise ValueError("its checksum is wrong")
    return record


def crc_of(record: Mapping[str, Any]) -> int:
    """CRC32C of the record's JSON, its members in their order."""
    return int(google_crc32c.value(json.dumps(record).encode()))
