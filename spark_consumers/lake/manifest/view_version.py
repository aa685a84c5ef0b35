"""What a manifest says of one view: its SQL, its table, and how that is kept (docs/views.md).

A view's table is one like any other in the lake: it has the epoch's rows, and is fenced, shown, pinned and expired with the others.
It is `live`, or `stale` with the reason, and then its rows are those of the epoch `as_of`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from spark_consumers.lake.manifest.table_version import TableVersion

INCREMENTAL = "incremental"
RECOMPUTED = "recomputed"


@dataclass(frozen=True, slots=True)
class ViewVersion:
    """One view of an epoch.

    `sql`: PostgreSQL's, as the configuration has it. `table`: its rows; None: it has never been computed, for the `reason`. `query`: Spark's
    SQL over the tables `tables` (`stream.schema.table`), which `{t0}`, `{t1}`, ... in it stand for. `paths`: where these tables were when its rows
    were computed. `digest`: of how the rows are made. `kind`: `incremental` or `recomputed`, and `why`. `hidden`: columns of its table
    that are not the view's.
    """

    sql: str
    table: TableVersion | None = None
    reason: str = ""
    query: str = ""
    tables: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    digest: str = ""
    kind: str = ""
    why: str = ""
    hidden: tuple[str, ...] = ()

    def full_name(self, name: str) -> str:
        """The name of the view's table, `stream.schema.view`: the stream is that of the first table that it reads."""
        return f"{self.tables[0].partition('.')[0]}.{name}"

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Self:
        """The view in a manifest's JSON. Raises `KeyError`, `TypeError` or `ValueError` for what is none."""
        table = record["table"]
        lists = {name: tuple(record[name]) for name in ("tables", "paths", "hidden")}
        made = None if table is None else TableVersion.from_json(table)
        return cls(**{**record, **lists, "table": made})

    def to_json(self) -> dict[str, Any]:
        """The view as a manifest has it."""
        record = {name: getattr(self, name) for name in self.__slots__}
        return {**record, "table": None if self.table is None else self.table.to_json()}
