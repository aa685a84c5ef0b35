"""What another engine runs to read the tables of one epoch: a statement of SQL or Python for each table. Pure.

By the tag of a pin where the engine knows tags, otherwise by the snapshot. Tables are opened by the folders of their copies:
the name of a table that was copied again since is another copy's.
"""

from collections.abc import Mapping
from typing import NamedTuple

from spark_consumers.lake.catalog.entries import CATALOG, Name

SPARK, DUCKDB, TRINO, PYICEBERG = "spark", "duckdb", "trino", "pyiceberg"
ENGINES = (TRINO, DUCKDB, SPARK, PYICEBERG)


class CutTable(NamedTuple):
    """A table of an epoch.

    `view`: the name that it gets; `path`: its folder below the lake; `is_current`: whether the table's name still stands for
    that folder; `tag`: a pin's tag on its snapshot, if there is one.
    """

    view: str
    path: str
    snapshot: int
    is_current: bool
    tag: str | None = None


def statements(engine: str, lake: str, tables: Mapping[str, CutTable]) -> dict[str, str]:
    """The statement for each table, `stream.schema.table`. `engine`: of `ENGINES`; `lake`: the lake's folder."""
    of_one = {SPARK: _spark, DUCKDB: _duckdb, TRINO: _trino, PYICEBERG: _pyiceberg}[engine]
    return {name: of_one(lake, name, table) for name, table in tables.items()}


def preamble(engine: str) -> str:
    """What the engine needs before the statements; empty if nothing."""
    if engine == PYICEBERG:
        return "from pyiceberg.table import StaticTable\n\ntables = {}"
    return "LOAD iceberg;" if engine == DUCKDB else ""


def _spark(_: str, __: str, table: CutTable) -> str:
    place = ".".join(quoted(part, "`") for part in table.path.split("/")[1:])
    version = text(table.tag) if table.tag else str(table.snapshot)
    view = quoted(table.view, "`")
    return f"CREATE OR REPLACE TEMPORARY VIEW {view} AS SELECT * FROM {CATALOG}.{place} VERSION AS OF {version};"


def _duckdb(lake: str, _: str, table: CutTable) -> str:
    view, folder = quoted(table.view, '"'), text(f"{lake}/{table.path}")
    return f"CREATE OR REPLACE VIEW {view} AS SELECT * FROM iceberg_scan({folder}, snapshot_from_id => {table.snapshot});"


def _trino(lake: str, name: str, table: CutTable) -> str:
    namespace, relation = Name.of(name)
    version = text(table.tag) if table.tag else str(table.snapshot)
    first = ""
    if not table.is_current:
        relation = table.path.rpartition("/")[2].lower()
        first = (
            f"CALL {CATALOG}.system.register_table(schema_name => {text(namespace)}, "
            f"table_name => {text(relation)}, table_location => {text(f'{lake}/{table.path}')});\n"
        )
    place = f"{CATALOG}.{quoted(namespace, chr(34))}.{quoted(relation, chr(34))}"
    return f"{first}SELECT * FROM {place} FOR VERSION AS OF {version};"


def _pyiceberg(lake: str, name: str, table: CutTable) -> str:
    opened = f"StaticTable.from_metadata({f'{lake}/{table.path}'!r})"
    scan = (
        f".scan().use_ref({table.tag!r})" if table.tag else f".scan(snapshot_id={table.snapshot})"
    )
    return f"tables[{name!r}] = {opened}{scan}"


def quoted(identifier: str, quote: str) -> str:
    """The identifier between quotes of this kind."""
    return f"{quote}{identifier.replace(quote, 2 * quote)}{quote}"


def text(value: str) -> str:
    """The value as a literal of SQL."""
    return "'" + value.replace("'", "''") + "'"
