"""Log sequence numbers: 64-bit positions in the write-ahead log.

In Python an LSN is an `int` (bytes from the start of the log); in text it is PostgreSQL's `X/Y`, two
hexadecimal halves (PostgreSQL documentation, 8.20 "pg_lsn Type").
"""

import re

from walsender_bridge.errors import MalformedMessageError

MAX_LSN = 2**64 - 1
_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


def parse_lsn(text: str) -> int:
    """The LSN written as `X/Y`. Raises `MalformedMessageError` for anything else."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise MalformedMessageError(
            f"{text[:40]!r} is not an LSN", repair="write it as two hexadecimal halves, 16/B374D848"
        )
    return int(match[1], 16) << 32 | int(match[2], 16)


def format_lsn(lsn: int) -> str:
    """`X/Y`, as PostgreSQL prints it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
