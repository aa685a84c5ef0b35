"""Which columns of a table are masked in the lake, as the configuration says it. Pure.

A column is hashed (`"hash"`), left out (`"drop"`), or has one value in all rows (`{ constant = "..." }`, as PostgreSQL writes it).
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

from walsender_bridge.postgres.column_name import column_name

HASH: Final = "hash"
DROP: Final = "drop"
CONSTANT: Final = "constant"


class ColumnMask(NamedTuple):
    """One column's mask. `argument`: of CONSTANT, the value's text; otherwise empty."""

    column: str
    kind: str
    argument: str = ""

    @classmethod
    def parse(cls, column: str, value: Any) -> Self:
        """Parse a mask. Raises `ValueError` for an invalid one."""
        name = column_name(column)
        if value in (HASH, DROP):
            return cls(name, value)
        if isinstance(value, Mapping) and set(value) == {CONSTANT}:
            if isinstance(value[CONSTANT], str):
                return cls(name, CONSTANT, value[CONSTANT])
            raise ValueError(f"mask of {column}: write the constant as a string in quotes")
        raise ValueError(
            f'mask of {column}: {value!r} is not "hash", "drop" or {{ constant = "..." }}'
        )


def parse_masks(given: Mapping[str, Any]) -> tuple[ColumnMask, ...]:
    """The masks of a section, ordered by column. Raises `ValueError` for an invalid one, or two of one column."""
    masks = tuple(sorted(ColumnMask.parse(column, value) for column, value in given.items()))
    for one, other in pairwise(masks):
        if one.column == other.column:
            raise ValueError(f"the column {one.column} has two masks")
    return masks
