"""The columns that a table of the lake has beside PostgreSQL's: the marks of deleted rows, and when versions began and ended. Pure.

`mode = "soft_delete"` keeps a row that is deleted. Its marks say when that was: the time of the commit, and the LSN at which the commit
record starts; they are NULL in a living row (`spark_consumers.fold.kept`). `mode = "history"` keeps all versions of each row, with the same of the
commits that began and ended each (`spark_consumers.fold.history`).
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from spark_consumers.decode.identity import VALID_TO_LSN
from spark_consumers.decode.masking import kept
from spark_consumers.decode.types import TIMESTAMPTZ
from walsender_bridge.postgres.column_masks import ColumnMask
from walsender_bridge.postgres.protocol.pgoutput import Column
from walsender_bridge.postgres.table_layout import CURRENT, HISTORY, SOFT_DELETE

DELETED_AT: Final = "_deleted_at"
VALID_FROM: Final = "_valid_from"
VALID_FROM_LSN: Final = "_valid_from_lsn"
_BIGINT: Final = 20


def _when(time: str, lsn: str) -> tuple[Column, Column]:
    """The columns of a commit."""
    return Column(time, TIMESTAMPTZ, -1, is_key=False), Column(lsn, _BIGINT, -1, is_key=False)


#: By the mode of a table, in this order behind its own columns. The last two are NULL in the rows that the source has.
BESIDE: Final[Mapping[str, tuple[Column, ...]]] = {
    CURRENT: (),
    SOFT_DELETE: _when(DELETED_AT, "_deleted_lsn"),
    HISTORY: (*_when(VALID_FROM, VALID_FROM_LSN), *_when("_valid_to", VALID_TO_LSN)),
}
#: What each mode keeps of a table, in words.
_KEPT: Final = {SOFT_DELETE: "deleted rows", HISTORY: "the history"}


def of_lake(
    columns: Sequence[Column], masks: Collection[ColumnMask], mode: str
) -> tuple[Column, ...]:
    """A table's columns as the lake has them: masked, and with those of its mode behind them."""
    return (*kept(columns, masks), *BESIDE[mode])


def unkept(names: Collection[str], key: Collection[str] | None, mode: str) -> str | None:
    """Why a table with columns of these names cannot have this mode; None if it can."""
    if mode == CURRENT:
        return None
    what = f"{_KEPT[mode]} cannot be kept"
    if not key:
        return f"{what}: it has no key, by which a row would be found again"
    taken = {column.name for column in BESIDE[mode]}
    for name in names:
        # Spark ignores case.
        if name.lower() in taken:
            return f'{what}: its column {name!r} has a name that the lake uses with mode = "{mode}"'
    return None
