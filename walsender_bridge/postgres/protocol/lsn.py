"""Log sequence numbers: 64-bit positions in the write-ahead log.

In text an LSN is PostgreSQL's `X/Y`, two hexadecimal halves (PostgreSQL documentation, 8.20 "pg_lsn Type").
"""

import re
from typing import NamedTuple, TypeAlias

from walsender_bridge.errors import MalformedMessageError

#: Bytes from the start of the log. An alias, not a `NewType`: loops over WAL add and subtract LSNs, and a `NewType` needs
#: a call after each addition to be an LSN again. A length in bytes is an `int`.
Lsn: TypeAlias = int

MAX_LSN = 2**64 - 1
_TEXT = re.compile(r"([0-9A-Fa-f]{1,8})/([0-9A-Fa-f]{1,8})")


class WalPosition(NamedTuple):
    """An LSN on a timeline: a position that was reached or confirmed, the start of a segment, or a timeline's switch point.

    Positions compare by timeline, then by LSN: in one server's history, that is the order in which they were reached. Between
    servers the order has no meaning: two that were promoted separately can use the same timeline for different WAL.
    """

    timeline: int
    lsn: Lsn


def parse_lsn(text: str) -> Lsn:
    """The LSN written as `X/Y`. Raises `MalformedMessageError` for anything else."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise MalformedMessageError(
            f"{text[:40]!r} is not an LSN", repair="write it as two hexadecimal halves, 16/B374D848"
        )
    return int(match[1], 16) << 32 | int(match[2], 16)


def format_lsn(lsn: Lsn) -> str:
    """`X/Y`, as PostgreSQL prints it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
