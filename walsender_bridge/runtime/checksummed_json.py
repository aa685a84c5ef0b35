"""A small JSON record with its checksum as a member: `crc32c`, of the JSON of all others."""

import json
from collections.abc import Mapping
from typing import Any, Final

import google_crc32c

_CRC: Final = "crc32c"


def sealed(record: Mapping[str, Any]) -> bytes:
    """The file of a record."""
    return json.dumps({**record, _CRC: crc_of(record)}).encode()


def opened(content: bytes) -> dict[str, Any]:
    """The record in a file, without its checksum; one that has none is taken as it is.

    For damage it raises `ValueError` or `TypeError`.
    """
    record = json.loads(content)
    if not isinstance(record, dict):
        raise TypeError("it is no object")
    told = record.pop(_CRC, None)
    if told is not None and told != crc_of(record):
        raise ValueError("its checksum is wrong")
    return record


def crc_of(record: Mapping[str, Any]) -> int:
    """CRC32C of the record's JSON, its members in their order."""
    return int(google_crc32c.value(json.dumps(record).encode()))
