"""What a manifest says of the change feed of one table (docs/feeds.md).

A feed is an Iceberg table like any other in the lake: it has the epoch's rows, and is fenced, shown, pinned and expired with the
others. Rows are only ever appended to it. It is `live`, or `stale` with the reason: then changes are missing, and it begins anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from spark_consumers.lake.manifest.table_version import LIVE, STALE, TableVersion


@dataclass(frozen=True, slots=True)
class FeedVersion:
    """The feed of one table of an epoch.

    `of`: the table, `stream.schema.table`, `path` where that was, and `start_lsn` from where on it had followed. `table`: the feed's own rows; None: it could not be made, for the
    `reason`. Its `layout`, `text_columns` and `masks` are those of the table's columns in it.
    """

    of: str
    path: str = ""
    table: TableVersion | None = None
    reason: str = ""
    start_lsn: int = 0

    def shown(self, of: TableVersion | None) -> TableVersion | None:
        """The feed as readers see it: where its table, `of`, does not follow, it has the changes up to the same epoch."""
        if self.table is None or self.table.state != LIVE or of is None or of.state == LIVE:
            return self.table
        return replace(self.table, state=of.state, as_of=of.as_of, reason=of.reason)

    def stopped(self, epoch: int, reason: str) -> Self:
        """The feed with the rows of this epoch, or of an earlier one, and why no more come."""
        if self.table is None:
            return replace(self, reason=reason)
        table = replace(self.table, state=STALE, as_of=self.table.as_of or epoch, reason=reason)
        return replace(self, table=table, reason=reason)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The feed in a manifest's JSON. Raises `KeyError`, `TypeError` or `ValueError` for what is none."""
        table = record["table"]
        made = None if table is None else TableVersion.from_json(table)
        return cls(**{**record, "table": made})

    def to_json(self) -> dict[str, Any]:
        """The feed as a manifest has it."""
        record = {name: getattr(self, name) for name in self.__slots__}
        return {**record, "table": None if self.table is None else self.table.to_json()}
