"""As `statements`, for a lake whose tables are in a REST catalog: the engine opens them by their names there. Pure.

A table that was copied again since is called as that copy is. Secrets are the engine's own affair: none is printed.
"""

from collections.abc import Mapping
from urllib.parse import unquote

from spark_consumers.lake.catalog.entries import CATALOG
from spark_consumers.lake.catalog.rest_names import own_name, plain_name
from spark_consumers.lake.catalog.statements import (
    DUCKDB,
    PYICEBERG,
    SPARK,
    TRINO,
    CutTable,
    quoted,
    text,
)
from spark_consumers.lake.catalog.table_catalog import TableId
from spark_consumers.spark.lake_catalog import LakeCatalog


def statements(engine: str, catalog: LakeCatalog, tables: Mapping[str, CutTable]) -> dict[str, str]:
    """The statement for each table, `stream.schema.table`. `engine`: of `statements.ENGINES`."""
    of_one = {SPARK: _spark, DUCKDB: _duckdb, TRINO: _trino, PYICEBERG: _pyiceberg}[engine]
    return {name: of_one(name, _place(catalog, each), each) for name, each in tables.items()}


def preamble(engine: str, catalog: LakeCatalog, *, guarded: bool) -> str:
    """What the engine needs before the statements; empty if that is in its configuration.

    `guarded`: the catalog wants a token, which is a secret `catalog` in DuckDB.
    """
    if engine == PYICEBERG:
        warehouse = f", warehouse={catalog.warehouse!r}" if catalog.warehouse else ""
        return (
            "from pyiceberg.catalog import load_catalog\n\n"
            f'catalog = load_catalog({CATALOG!r}, type="rest", uri={catalog.uri!r}{warehouse})\n'
            "tables = {}"
        )
    if engine == DUCKDB:
        # Where the catalog wants no token, DuckDB has to be told so: otherwise it wants a secret.
        attached = f"ATTACH {text(catalog.warehouse)} AS {CATALOG} (TYPE iceberg, ENDPOINT {text(catalog.uri)}, "
        chosen = "SECRET catalog" if guarded else "AUTHORIZATION_TYPE 'none'"
        return f"LOAD httpfs;\nLOAD iceberg;\n{attached}{chosen});"
    return ""


def _place(catalog: LakeCatalog, table: CutTable) -> tuple[tuple[str, ...], str]:
    """The table's namespace and name."""
    *_, stream, schema, folder = table.path.split("/")
    id_ = TableId((stream, schema), folder)
    name = plain_name(id_) if table.is_current else own_name(id_)
    return (*catalog.namespace, stream, unquote(schema)), name


def _version(table: CutTable) -> str:
    return text(table.tag) if table.tag else str(table.snapshot)


def _spark(_: str, place: tuple[tuple[str, ...], str], table: CutTable) -> str:
    name = ".".join(quoted(part, "`") for part in (*place[0], place[1]))
    view = quoted(table.view, "`")
    return f"CREATE OR REPLACE TEMPORARY VIEW {view} AS SELECT * FROM {CATALOG}.{name} VERSION AS OF {_version(table)};"


def _duckdb(_: str, place: tuple[tuple[str, ...], str], table: CutTable) -> str:
    name = f"{CATALOG}.{quoted('.'.join(place[0]), chr(34))}.{quoted(place[1], chr(34))}"
    view = quoted(table.view, '"')
    return (
        f"CREATE OR REPLACE VIEW {view} AS SELECT * FROM {name} AT (VERSION => {table.snapshot});"
    )


def _trino(_: str, place: tuple[tuple[str, ...], str], table: CutTable) -> str:
    name = f"{CATALOG}.{quoted('.'.join(place[0]).lower(), chr(34))}.{quoted(place[1].lower(), chr(34))}"
    return f"SELECT * FROM {name} FOR VERSION AS OF {_version(table)};"


def _pyiceberg(name: str, place: tuple[tuple[str, ...], str], table: CutTable) -> str:
    scan = (
        f".scan().use_ref({table.tag!r})" if table.tag else f".scan(snapshot_id={table.snapshot})"
    )
    return f"tables[{name!r}] = catalog.load_table({(*place[0], place[1])!r}){scan}"
