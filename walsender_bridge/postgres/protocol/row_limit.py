"""Detects rows that no walsender can send: the text of a value or of the row exceeds the server's allocation limit.

PostgreSQL allocates at most `MAX_ALLOC` bytes at once, and a row's text is one allocation. A table can contain larger rows:
the text of a `bytea` has two bytes per byte, that of a `bit varying` eight, and a row has many columns. Such
a row can be written, but decoding it fails every time, since WAL does not change: the slot cannot advance past it.

The error identifies neither table nor row. Its context contains the LSN of the change, in the language of lc_messages.
"""

import re
from typing import Final

from walsender_bridge.errors import UnsupportedValueError

#: PostgreSQL's `MaxAllocSize`, in bytes.
MAX_ALLOC: Final = (1 << 30) - 1
#: No value's text is larger; a greater request indicates a length corrupted by damage.
_LARGEST_TEXT: Final = 1 << 40
#: `program_limit_exceeded`: the text of a whole row outgrew its buffer.
_PROGRAM_LIMIT: Final = "54000"
_REQUEST: Final = re.compile(r"invalid memory alloc request size (\d+)")
_LSN: Final = re.compile(r"\b[0-9A-F]{1,8}/[0-9A-F]{1,8}\b")


def unsendable_row(
    sqlstate: str, text: str, context: str, where: str
) -> UnsupportedValueError | None:
    """The error, if the server ended a logical stream because of such a row. `context`: the error's CONTEXT field."""
    request, lsns = _REQUEST.match(text), _LSN.findall(context)
    too_large = request is not None and MAX_ALLOC < int(request[1]) < _LARGEST_TEXT
    if not lsns or not (too_large or sqlstate == _PROGRAM_LIMIT):
        return None
    return UnsupportedValueError(
        f"the row changed at LSN {lsns[-1]} is too large as text for PostgreSQL to send: "
        f"{' '.join(text.split())[:200]} (SQLSTATE {sqlstate})",
        where=where,
        repair=f"the slot cannot advance past this row: find its table with pg_waldump --start={lsns[-1]} --limit=1, shorten or "
        "delete the value, then run `tuskline down` and `tuskline detach`, and attach again under another source "
        'name (docs/types.md, "Rows that cannot be sent")',
    )
