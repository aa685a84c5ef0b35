"""Rows of the index as arrays of numbers, for the action `commits`. Pure."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Final

from walsender_bridge.change_log.protocol import CommitContext, Position
from walsender_bridge.change_log.replica.disk import IndexRow
from walsender_bridge.errors import MalformedMessageError

#: The greatest number of rows in an answer.
MAX_ROWS: Final = 10_000
_CONTEXT: Final = len(fields(CommitContext))
_LENGTH: Final = _CONTEXT + len(fields(Position)) + 2


def values(row: IndexRow) -> tuple[int, ...]:
    """The numbers of a row: those of its context and position, its size and time."""
    c, p = row.context, row.position
    return (
        *(getattr(c, name) for name in CommitContext.__slots__),
        *(getattr(p, name) for name in Position.__slots__),
        *(row.size, row.taken_at),
    )


def of_values(numbers: Sequence[int]) -> IndexRow:
    """The row of these numbers. Raises `MalformedMessageError`."""
    if len(numbers) != _LENGTH:
        raise MalformedMessageError(f"a commit of {len(numbers)} numbers instead of {_LENGTH}")
    context, position = numbers[:_CONTEXT], numbers[_CONTEXT:-2]
    return IndexRow(CommitContext(*context), numbers[-2], Position(*position), numbers[-1])
