"""What a manifest says of one table: where it is, whose rows it has, and whether it follows the log.

A table of an epoch is in one of these states (docs/tables.md):

| state | its rows are those of | epochs |
|---|---|---|
| `live` | this epoch | continue |
| `paused` | the epoch `as_of`, on request | continue without its changes |
| `resuming` | the epoch `as_of`, and of the next one again | continue |
| `held` | the epoch `as_of`: it cannot follow | wait for it |
| `stale` | the epoch `as_of`: it cannot follow, or is copied again after a pause | continue without its changes |
| `left` | the epoch `as_of`: it is no longer in the publication | continue |

A copy that is not shown yet has the state `copied`; it stands beside the table, in `Manifest.copies`. So does one that is read
in chunks, of which some are still to come.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from spark_consumers.decode.identity import identity_of
from walsender_bridge.postgres.column_masks import ColumnMask
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.table_layout import CURRENT, RowRules

LIVE = "live"
COPIED = "copied"
LEFT = "left"
PAUSED = "paused"
RESUMING = "resuming"
HELD = "held"
STALE = "stale"
#: Why a table is copied that lacks nothing but changes: most of its rows may be the source's.
REATTACHED: Final = "its source was reattached, so changes may be missing in the log"
ANOTHER_LOG: Final = "the lake continues with another log"

#: A column as the log describes it: name, type OID, type modifier.
Column = tuple[str, int, int]
#: A range of the key's first column, from where the one before ends: its end (exclusive; None: it has no end), and the LSN of the
#: snapshot that it was read from.
Chunk = tuple[int | None, Lsn]

#: What the formats before 6 called these.
_BEFORE_6 = {
    "unfit_rows": "quarantined_rows",
    "unfit_files": "quarantine_files",
    "retry_unfit": "retry_quarantined",
}


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """The cut of one stream: everything below `offset` (exclusive, a local offset) is in the epoch.

    `lsn` is the end LSN of the last transaction in it (an int, 0 if none), `commit_time` that
    transaction's, in microseconds since the Unix epoch.
    """

    timeline: int
    lsn: Lsn
    commit_time: int
    offset: int


@dataclass(frozen=True, slots=True)
class TableVersion:
    """One table of an epoch.

    `path` is relative to the lake. `key` is empty for a table without one (a multiset). `text_columns` are kept
    as PostgreSQL's text. Changes of transactions whose commit record starts before `start_lsn` are in the
    initial copy; `offset` is where in the stream the changes begin that it lacks (used while it does not
    follow). `rows` is the exact number of rows, `stage` the name that the files of its last write carry,
    `relation_id` PostgreSQL's OID of the table that was copied. `system_id` and `timeline`: of the server that it was
    copied from (0: copied before that was recorded). `shape`: what the source's catalog said when it was copied, or
    when it was last seen to follow (`Shape.dump`; empty: not polled since an earlier version wrote it).

    `layout`: PostgreSQL's columns (none in a table of format 1 that was not copied since). `as_of`: the epoch
    whose rows it has (0: this one). `reason`: why it does not follow. `resync`: why it is copied again.

    `quarantined_rows` of the source's rows are not among its `rows`, because they have an unrepresentable value
    (`quarantine`); `skipped_rows` of these an operator has skipped. `quarantine_files`, relative to `path`, has
    them all. `retry_quarantined`: the next epoch tries them again. `mark`: of a copy, where the log was when it was
    taken on (`rolled_back.mark_of_copy`; empty: in a link of an earlier version).

    `runs`: the row index (`spark_consumers.lake.index`), as the paths of its runs below `path` and how much each holds, the
    oldest first. None: it has to be built from the table's files. `copy_on_write`: its data files have no removed rows, as
    the configuration said when they were written (`policy`). `chunks`: of a copy that was read from several snapshots, those
    that it has, of which `start_lsn` is the last one's; empty once the table is shown. `masks`, `mode` and `row_filter`: what the configuration said of its rows
    when it was copied (`table_layout.RowRules`). `had_masks`: of tables that had this name before, their OIDs, and the columns that were
    masked (`disclosed`). `lake_name`: the name that readers know it by, `stream.schema.table` (`target_names`); empty: that at the source.
    `history_from`: the source's time at which its history begins, in microseconds since the Unix epoch, and `start_lsn` is the LSN; 0: it has none.
    """

    path: str
    format: str
    snapshot_id: int
    schema_hash: str
    key: tuple[str, ...]
    text_columns: tuple[str, ...]
    start_lsn: Lsn
    offset: int
    rows: int
    relation_id: int
    state: str = LIVE
    stage: str = ""
    layout: tuple[Column, ...] = ()
    as_of: int = 0
    reason: str = ""
    resync: str = ""
    quarantined_rows: int = 0
    skipped_rows: int = 0
    quarantine_files: tuple[str, ...] = ()
    retry_quarantined: bool = False
    system_id: int = 0
    timeline: int = 0
    shape: str = ""
    mark: tuple[int, ...] = ()
    runs: tuple[tuple[str, int], ...] | None = None
    copy_on_write: bool = False
    chunks: tuple[Chunk, ...] = ()
    masks: tuple[ColumnMask, ...] = ()
    mode: str = CURRENT
    row_filter: str = ""
    had_masks: tuple[tuple[int, tuple[str, ...]], ...] = ()
    lake_name: str = ""
    history_from: int = 0

    @property
    def rules(self) -> RowRules:
        """What it has of the source's rows."""
        return RowRules(self.masks, self.mode, self.row_filter)

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that identify its rows in the lake (`decode.identity`); none without a key."""
        return identity_of(self.key, self.mode)

    @property
    def unfit(self) -> str | None:
        """Why its rows are of no use for the next copy; None if it may be brought level (`copy.leveling`)."""
        if self.state not in {HELD, STALE}:
            return f"it is {self.state}"
        if self.masks:
            return "some of its columns are masked, so the lake does not have what the source has"
        if self.rules != RowRules():
            return "by its mode or row filter, the lake has other rows of it than the source"
        if self.quarantined_rows or self.quarantine_files:
            return "it has quarantined rows"
        if not self.snapshot_id or not self.layout:
            return "an earlier version wrote it"
        return None

    @property
    def is_leveled(self) -> bool:
        """Whether it lacks nothing but changes, and is brought level with its source, if that succeeds, instead of being copied."""
        return self.resync in {REATTACHED, ANOTHER_LOG} and self.unfit is None

    @property
    def is_partial(self) -> bool:
        """Whether it is a copy of which some chunks are still to come."""
        return bool(self.chunks) and self.chunks[-1][0] is not None

    @property
    def index_files(self) -> tuple[str, ...]:
        """The files of its row index, relative to `path`."""
        return tuple(name for name, _ in self.runs or ())

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The table in a manifest's JSON. Raises `KeyError`, `TypeError` or `ValueError` for what is none."""
        return cls(**cls.members({_BEFORE_6.get(name, name): v for name, v in record.items()}))

    @staticmethod
    def members(record: Mapping[str, Any]) -> dict[str, Any]:
        """These members of a table, from JSON. Raises as `from_json`."""
        return {
            name: _FROM_LISTS[name](value) if name in _FROM_LISTS else value
            for name, value in record.items()
        }

    def to_json(self) -> dict[str, Any]:
        """The table as a manifest has it. Its tuples are lists there."""
        return {name: getattr(self, name) for name in self.__slots__}


#: What JSON has as lists.
_FROM_LISTS: dict[str, Callable[[Any], Any]] = {
    "key": tuple,
    "text_columns": tuple,
    "quarantine_files": tuple,
    "mark": tuple,
    "runs": lambda runs: None if runs is None else tuple((str(n), int(w)) for n, w in runs),
    "chunks": lambda chunks: tuple(
        (None if end is None else int(end), int(lsn)) for end, lsn in chunks
    ),
    "masks": lambda masks: tuple(ColumnMask(*mask) for mask in masks),
    "had_masks": lambda tables: tuple((int(oid), tuple(columns)) for oid, columns in tables),
    "layout": lambda layout: tuple((n, int(t), int(m)) for n, t, m in layout),
}
