"""Parses the rows of pgoutput messages, one at a time, to be shown. Pure.

Readers of many rows use `spark_consumers.decode.entries`. The form is that of protocol version 1, without the xid.
"""

from dataclasses import dataclass
from enum import Enum

from walsender_bridge.errors import MalformedMessageError
from walsender_bridge.postgres.protocol.pgoutput import (
    DELETE,
    INSERT,
    MAX_COLUMNS,
    UPDATE,
    relation_oid,
)


class Unchanged(Enum):
    """In place of a value: the server does not send a TOAST value that an update left as it was."""

    VALUE = "unchanged"


#: A column's bytes (in text or, as `bytearray`, in binary form), None for NULL.
Value = bytes | bytearray | Unchanged | None
_OLD, _KEY, _NEW = ord("O"), ord("K"), ord("N")


@dataclass(frozen=True, slots=True)
class RowChange:
    """An Insert, Update or Delete. `key`: `old` has values in the columns of the replica identity only."""

    kind: int
    oid: int
    old: tuple[Value, ...] | None
    new: tuple[Value, ...] | None
    key: bool = False


def parse_row(message: bytes) -> RowChange:
    """An Insert, Update or Delete message. Raises `MalformedMessageError`."""
    if not message or message[0] not in {INSERT, UPDATE, DELETE}:
        raise _fault("not a row", message)
    kind, oid, at = message[0], relation_oid(message), 5
    old = new = None
    key = False
    while at < len(message):
        part, at = message[at], at + 1
        values, at = _tuple(message, at)
        if part in {_OLD, _KEY} and old is None and new is None and kind != INSERT:
            old, key = values, part == _KEY
        elif part == _NEW and new is None and kind != DELETE:
            new = values
        else:
            raise _fault("a row has unexpected parts", message)
    if (new is None) == (kind != DELETE) or (kind == DELETE and old is None):
        raise _fault("a row is cut short", message)
    return RowChange(kind, oid, old, new, key)


def _tuple(message: bytes, at: int) -> tuple[tuple[Value, ...], int]:
    count = int.from_bytes(message[at : at + 2], "big")
    at += 2
    if count > MAX_COLUMNS or at > len(message):
        raise _fault(f"{count} columns", message)
    values: list[Value] = []
    for _ in range(count):
        form, at = message[at : at + 1], at + 1
        if form == b"n":
            values.append(None)
        elif form == b"u":
            values.append(Unchanged.VALUE)
        elif form in {b"t", b"b"}:
            end = at + 4 + int.from_bytes(message[at : at + 4], "big")
            if at + 4 > len(message) or end > len(message):
                raise _fault("a row is cut short", message)
            value = message[at + 4 : end]
            values.append(value if form == b"t" else bytearray(value))
            at = end
        else:
            raise _fault(f"a column of form {form!r}", message)
    return tuple(values), at


def _fault(what: str, message: bytes) -> MalformedMessageError:
    return MalformedMessageError(f"{what} ({len(message)} bytes)", where="pgoutput")
