"""What the configuration says about tables that cannot follow, and how rows are removed from a table. Pure.

`failing_table` has three values:

- `hold`: all or nothing. No epoch is published while a table cannot follow.
- `wait_for_copy` (the default): epochs wait for a table that is being copied again, for that ends by itself. They continue
  without one that waits for an operator (a value that the lake cannot hold, damage, a fault of ours, changes
  that the log has trimmed), or of which a copy has failed.
- `go_on`: epochs wait for no table.

A table without which epochs continue is `stale`, and a reader gets it only by asking for that (`reader.read`): so a
transaction is in all tables that a snapshot gives, or in none, whatever is set here.

`deletes` has three values, by table (`stream.schema.table`) and for all others as `default`:

- `vectors` (the default): removed rows are named by deletion vectors, at the cost of the changes.
- `position-deletes`: removed rows are named by files of positions, at about the same cost, for engines that know version 2 of
  Iceberg's format. A table that is in version 3 stays there, and gets vectors, until it is copied again.
- `copy-on-write`: data files with removed rows are written again, for engines that do not apply deletion vectors. An epoch
  costs as much as the data files that it touches.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.table_version import HELD, LIVE, STALE, TableVersion
from walsender_bridge.errors import NotSupportedError

HOLD, WAIT_FOR_COPY, GO_ON = "hold", "wait_for_copy", "go_on"
#: Bytes of a chunk by default.
CHUNK_BYTES: Final = 4 << 30
VECTORS, POSITION_DELETES, COPY_ON_WRITE = "vectors", "position-deletes", "copy-on-write"


def deletes_of(deletes: Mapping[str, str], name: str) -> str:
    """How the rows of this table (`stream.schema.table`) are removed."""
    return deletes.get(name, deletes.get("default", VECTORS))


def copies_on_write(deletes: Mapping[str, str], name: str) -> bool:
    """Whether no data file of this table (`stream.schema.table`) is to have removed rows."""
    return deletes_of(deletes, name) == COPY_ON_WRITE


def deletes_by_position(deletes: Mapping[str, str], name: str) -> bool:
    """Whether the removed rows of this table (`stream.schema.table`) are to be in files of positions."""
    return deletes_of(deletes, name) == POSITION_DELETES


def without_vectors(deletes: Mapping[str, str], where: str) -> dict[str, str]:
    """The same where the catalog at `where` has no deletion vectors. Raises `NotSupportedError` where some are asked for."""
    if asked := sorted(name for name, how in deletes.items() if how == VECTORS):
        raise NotSupportedError(
            f"the catalog does not support version 3 of Iceberg's format, and thus no deletion vectors: {', '.join(asked)}",
            where=where,
            repair='set "copy-on-write" for them in [lake.deletes], or use another catalog',
        )
    return {**deletes, "default": COPY_ON_WRITE}


def to_copy_on_write(deletes: Mapping[str, str], tables: Mapping[str, TableVersion]) -> set[str]:
    """The tables that are copied on write from now on, and were not: their vectors are replaced."""
    return {
        name
        for name, table in tables.items()
        if table.state == LIVE and copies_on_write(deletes, name) and not table.copy_on_write
    }


@dataclass(frozen=True)
class Policy:
    """What the configuration says of tables.

    `failing_table`: see above. `copy_rate`: bytes a second that a copy writes at most. `keep_paused`: seconds for which
    the log is kept for a paused table. `copy_chunk_bytes`: of a chunk of a table that is copied in chunks (`copy.chunk`).
    """

    failing_table: str = WAIT_FOR_COPY
    copy_rate: float | None = None
    keep_paused: float = 86_400.0
    copy_chunk_bytes: int = CHUNK_BYTES

    def holds(self, *, copied_again: bool) -> bool:
        """Whether epochs wait for a table that stops following now; `copied_again`: a copy of it is made by itself."""
        return self.failing_table == HOLD or (copied_again and self.failing_table == WAIT_FOR_COPY)

    @property
    def holds_streams(self) -> bool:
        """Whether epochs wait for the tables of a stream whose log was rolled back (`rolled_back`)."""
        return self.failing_table != GO_ON

    def released(self, head: Manifest, rolled_back: str) -> Manifest:
        """The head with the tables that hold the epochs back, and are not to by this policy, stale.

        `rolled_back`: what the reason of a table begins with whose log was rolled back.
        """
        if self.failing_table == HOLD:
            return head
        tables = dict(head.tables)
        for name, table in head.tables.items():
            if table.state != HELD:
                continue
            waits = name not in head.not_copied and bool(table.resync)
            if self.failing_table == GO_ON or not (waits or table.reason.startswith(rolled_back)):
                tables[name] = replace(table, state=STALE)
        return replace(head, tables=tables)
