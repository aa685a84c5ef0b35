"""One table as the tasks of an epoch need it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Self

import pyarrow as pa

from spark_consumers.decode.identity import identity_of
from spark_consumers.decode.masking import NOTHING, Masking
from spark_consumers.decode.mode_columns import of_lake
from spark_consumers.lake.epoch.feed_rows import FeedTarget
from spark_consumers.lake.format.table_format import ROW_ID
from spark_consumers.lake.layout.arrangement import PLAIN, Arrangement
from spark_consumers.lake.manifest.table_version import Chunk, TableVersion
from spark_consumers.lake.store.place import place
from spark_consumers.lake.tables.row_filter import RowFilter
from spark_consumers.lake.tables.schema_match import Layout
from walsender_bridge.postgres.protocol.lsn import Lsn
from walsender_bridge.postgres.protocol.pgoutput import Column
from walsender_bridge.postgres.table_layout import CURRENT, SOFT_DELETE


@dataclass(frozen=True)
class Target:
    """One table as a task needs it.

    `name` is `stream.schema.table`, `relation` its last two parts, `prefix` the path that its data files
    begin with. `columns` are PostgreSQL's columns as Arrow types, `file_schema` those of the data files
    (and `ROW_ID`, in a table without a key that an earlier version copied). Changes of transactions whose commit record starts below
    `start_lsn` are left out. `relation_id` is the OID of the table that was copied, by which
    the log has its changes, whatever its name was. `quarantines`: unrepresentable rows are quarantined, beside those of `quarantine_files`,
    which are converted again if `retry_quarantined`. `layouts`: the columns of its changes, from which offset on; those
    that come at the end of `columns` only later are NULL before. `partitions`: the known ones, by OID, and before which
    commit LSN they must not have had changes. `copy_on_write`: data files with removed rows are written again,
    `by_position`: removed rows are in files of positions (`policy`). `arrangement`: how its data files are written.
    `chunks`: of a copy that was read from several snapshots, until it is shown. `is_maintained`: data files are rewritten by a maintainer, where it can.
    `masking`: how its changes are masked, or why they must not be decoded. `mode`: what it keeps beside the source's
    rows (`mode_columns`): how its changes are folded. `feed`: where its changes go, too. `row_filter`: which rows it has; None: all.
    """

    name: str
    relation: str
    prefix: str
    columns: pa.Schema
    file_schema: pa.Schema
    key: tuple[str, ...]
    start_lsn: Lsn
    relation_id: int
    layouts: tuple[Layout, ...] = ()
    partitions: Mapping[int, int] = field(default_factory=dict)
    quarantines: bool = False
    quarantine_files: tuple[str, ...] = ()
    retry_quarantined: bool = False
    copy_on_write: bool = False
    by_position: bool = False
    arrangement: Arrangement = PLAIN
    is_maintained: bool = False
    chunks: tuple[Chunk, ...] = ()
    masking: Masking | str = NOTHING
    mode: str = CURRENT
    feed: FeedTarget | None = None
    row_filter: RowFilter | None = None

    @classmethod
    def of(
        cls, name: str, table: TableVersion, prefix: str, columns: pa.Schema, file_schema: pa.Schema
    ) -> Self:
        """The target of the table `name`, with what its link says of every one."""
        return cls(
            name=name,
            relation=name.partition(".")[2],
            prefix=prefix,
            columns=columns,
            file_schema=file_schema,
            key=table.key,
            start_lsn=table.start_lsn,
            relation_id=table.relation_id,
            mode=table.mode,
        )

    @property
    def may_lack_rows(self) -> bool:
        """Whether it may lack a row that a change is of."""
        return self.mode == SOFT_DELETE or self.row_filter is not None

    @property
    def scratch_name(self) -> str:
        """How its scratch files begin: the table's name may be a path, chosen by any role that may create tables."""
        return hashlib.sha256(self.name.encode()).hexdigest()[:20]

    @property
    def folder(self) -> str:
        """The table's folder."""
        return str(place(self.prefix).parent.parent)

    @property
    def stage(self) -> str:
        """What the names of all its new files begin with."""
        return PurePath(self.prefix).name

    @property
    def identity(self) -> tuple[str, ...]:
        """The columns that identify its rows: the key, and of a history the version's end as well; none without a key."""
        return identity_of(self.key, self.mode)

    @property
    def key_positions(self) -> tuple[int, ...]:
        """Where the key's columns are among the columns."""
        return tuple(self.columns.get_field_index(name) for name in self.key)


def columns_of(table: TableVersion) -> tuple[Column, ...]:
    """The columns of a table in the lake; none of a table of format 1. Which of them are its key's, its version says."""
    columns = tuple(Column(*column, is_key=False) for column in table.layout)
    return of_lake(columns, table.masks, table.mode)


def names_in(table: TableVersion, there: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of the columns of a table's metadata, those of its data files: its own, and behind them hidden ones.

    An attempt that was not published may have left the table with more columns.
    """
    # With a key, a column of this name is the table's own.
    hidden = [] if table.key or ROW_ID not in there else [ROW_ID]
    own = [column.name for column in columns_of(table)]
    return own or [name for name in there if name not in hidden], hidden
