"""The columns that a table of the lake has beside PostgreSQL's: the marks of deleted rows. Pure.

`mode = "soft_delete"` keeps a row that is deleted. Its marks say when that was: the time of the commit, and the LSN at which the commit
record starts; they are NULL in a living row (`spark_consumers.fold.kept`).
"""

from collections.abc import Collection, Sequence
from typing import Final

from spark_consumers.decode.masking import kept
from spark_consumers.decode.types import TIMESTAMPTZ
from walsender_bridge.postgres.column_masks import ColumnMask
from walsender_bridge.postgres.protocol.pgoutput import Column
from walsender_bridge.postgres.table_layout import SOFT_DELETE

DELETED_AT: Final = "_deleted_at"
DELETED_LSN: Final = "_deleted_lsn"
_BIGINT: Final = 20
#: In this order behind a table's own columns.
MARKS: Final = (
    Column(DELETED_AT, TIMESTAMPTZ, -1, is_key=False),
    Column(DELETED_LSN, _BIGINT, -1, is_key=False),
)


def of_lake(
    columns: Sequence[Column], masks: Collection[ColumnMask], mode: str
) -> tuple[Column, ...]:
    """A table's columns as the lake has them: masked, and with the marks behind them if it keeps deleted rows."""
    return (*kept(columns, masks), *(MARKS if mode == SOFT_DELETE else ()))


def unkept(names: Collection[str], key: Collection[str] | None) -> str | None:
    """Why deleted rows of a table with columns of these names cannot be kept; None if they can."""
    if not key:
        return "it has no key, by which a deleted row would be found again"
    for name in names:
        # Spark ignores case.
        if name.lower() in {DELETED_AT, DELETED_LSN}:
            return f"its column {name!r} has a name that the lake uses to mark deleted rows"
    return None
