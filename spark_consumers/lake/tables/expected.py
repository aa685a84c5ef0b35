"""Changes of columns that a source's catalog shows, and that the log is expected to tell.

Where an event trigger records schema changes (`recorded`), the catalog is ahead of the log. A table whose columns differ there has
missed nothing yet: it is compared again once the lake has read the log up to where the catalog was read. If no record up to there has
described the columns that the catalog had, the change was not recorded, and the table is copied again.

Which tables this is right for: `Shape.recorded` has the row versions of the event trigger and of its function. If it is the same in
the catalog as in the table's shape, the trigger was there, and was enabled, all the time between. So only a change that the trigger
failed to write, or that no ALTER TABLE has made (DROP TYPE ... CASCADE), is found one epoch later than without records.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.tables.schema_change import Evolution
from spark_consumers.lake.tables.shape import Columns, Shape, columns_in, with_columns_of
from walsender_bridge.postgres.protocol.lsn import Lsn

#: Why a table is copied again whose columns no record has described.
UNRECORDED = "its columns changed, which the event trigger tuskline_ddl has not recorded"


@dataclass
class _Seen:
    """Columns that the catalog had at an LSN; and those that records have described since."""

    lsn: Lsn
    columns: Columns
    described: set[Columns] = field(default_factory=set)


class Expected:
    """The changes that are expected, by the folder of their table, which a rename does not change. Used by one thread."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def written(self, head: Manifest, evolutions: Mapping[str, Evolution]) -> None:
        """The epoch `head` is published, with these changes of tables by path."""
        paths = {table.path for table in head.tables.values()}
        self._seen = {path: seen for path, seen in self._seen.items() if path in paths}
        for path in self._seen.keys() & evolutions.keys():
            self._seen[path].described.update(evolutions[path].steps)

    def compared(self, table: TableVersion, now: Shape, lsn: Lsn, read_to: Lsn) -> Shape | str:
        """The shape to compare the table with: without the changes of its columns that are expected; or why it is copied again.

        `now`: what the catalog had at `lsn`. `read_to`: up to where the lake has read the log.
        """
        if not table.shape:
            return now
        before = Shape.load(table.shape)
        seen = self._seen.get(table.path)
        if seen is not None:
            if seen.columns in {*seen.described, columns_in(before)}:
                seen = None
            elif read_to >= seen.lsn:
                del self._seen[table.path]
                return UNRECORDED
        if not now.recorded or now.recorded != before.recorded:
            seen = None
        elif seen is None and columns_in(now) != columns_in(before):
            if read_to >= lsn:
                return UNRECORDED
            seen = _Seen(lsn, columns_in(now))
        if seen is None:
            self._seen.pop(table.path, None)
            return now
        self._seen[table.path] = seen
        return with_columns_of(now, before)


def is_expected(table: TableVersion, now: Shape) -> bool:
    """Whether the columns differ in the catalog, and the log is to tell that."""
    if not table.shape or not now.recorded:
        return False
    before = Shape.load(table.shape)
    return now.recorded == before.recorded and columns_in(now) != columns_in(before)
