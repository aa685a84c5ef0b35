"""Rows of a table whose schema changes were recorded, as the lake's own rules make them of what a real server sends."""

from typing import Any

import pyarrow as pa
import pytest
from psycopg import sql

from spark_consumers.decode.entries import decode_entries
from spark_consumers.decode.types import arrow_schema
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.tables.evolve import evolve
from spark_consumers.lake.tables.recorded import DDL_TABLE, records_in
from spark_consumers.lake.tables.schema_change import FullResync
from spark_consumers.lake.tables.schema_match import by_layout, conformed, mismatch
from spark_consumers.lake.tables.shape import Shape, changed, sent_columns
from spark_consumers.lake.tables.sources import Source, read_publication
from tests.support.change_entries import Entries
from tests.support.servers import Database, each_major
from tests.support.slot_changes import PUBLICATION, changes_of
from walsender_bridge.postgres.protocol.pgoutput import DELETE, TRUNCATE, Column
from walsender_bridge.runtime.sql import load

#: Columns and their values, by the table's key.
Rows = dict[int, dict[str, Any]]


def install(database: Database, table: str = "t") -> None:
    database.execute(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE {table}", load("ddl/install"))
    publish = sql.SQL(load("ddl/publish")).format(publication=sql.Identifier(PUBLICATION))
    database.execute(publish.as_string(None))


def shape_of(database: Database) -> Shape:
    return read_publication(Source("s", database.dsn, PUBLICATION)).shapes["public.t"]


def rows_of(database: Database) -> Rows:
    with database.connect() as connection:
        found = connection.execute("SELECT to_jsonb(t) FROM t").fetchall()
    return {row["id"]: row for (row,) in found}


def copied(database: Database) -> TableVersion:
    """The table as a copy leaves it."""
    shape = shape_of(database)
    with database.connect() as connection:
        query = "SELECT attname, atttypmod FROM pg_attribute WHERE attrelid = 't'::regclass"
        modifiers: dict[str, int] = dict(connection.execute(query).fetchall())
    layout = tuple((name, kind, modifiers[name]) for name, kind in sent_columns(shape).values())
    made = TableVersion("t", "iceberg", 1, "", ("id",), (), 0, 0, 0, shape.oid, layout=layout)
    return TableVersion(**{**vars_of(made), "runs": (), "shape": shape.dump()})


def vars_of(table: TableVersion) -> dict[str, Any]:
    return {name: getattr(table, name) for name in table.__dataclass_fields__}


def followed(table: TableVersion, rows: Rows, log: Entries) -> tuple[Rows, Shape] | str:
    """The rows after the changes in the log, and the table's shape; or why the table is copied again."""
    batches = list(decode_entries(log.entries, log.schemas))
    records = [
        record
        for batch in batches
        if batch.relation.full_name == DDL_TABLE
        for record in records_in(batch)
        if record.relation == table.relation_id
    ]
    found = evolve(table, records)
    if isinstance(found, FullResync):
        return found.reason
    assert found.shape is not None
    columns: pa.Schema = arrow_schema(
        Column(*column, is_key=False) for column in found.layouts[-1].columns
    )
    names = [column[0] for column in table.layout]
    rows = {
        key: {
            name: None if at is None else row[names[at]]
            for name, at in zip(columns.names, found.sources, strict=True)
        }
        for key, row in rows.items()
    }
    for batch in batches:
        if batch.relation.full_name != "public.t":
            continue
        for layout, part in by_layout(batch, found.layouts):
            why = mismatch(part, columns, layout, found.key, table.relation_id)
            if why is not None:
                return why or "its changes have other columns than were recorded"
            made = conformed(part, columns, layout)
            for at in range(len(made)):
                row = {
                    name: values[at].as_py()
                    for name, values in zip(columns.names, made.columns, strict=True)
                }
                if made.ops[at] == TRUNCATE:
                    rows.clear()
                elif made.ops[at] == DELETE:
                    rows.pop(row["id"], None)
                else:
                    rows[row["id"]] = row
    return rows, found.shape


def check(database: Database, *statements: str, in_place: bool | None = None) -> None:
    """After these statements the lake has the rows that the source has, or copies the table again."""
    table, rows = copied(database), rows_of(database)
    with changes_of(database.dsn) as changes:
        database.execute(*statements)
        log = changes()
    found = followed(table, rows, log)
    if isinstance(found, str):
        assert in_place is not True, found
        return
    rows, shape = found
    if changed(shape, shape_of(database)) is None:
        # Nothing would be noticed later.
        assert rows == rows_of(database)
        assert in_place is not False


ONE_TRANSACTION = {
    "a renamed column gets other values in the same transaction": (
        "BEGIN; ALTER TABLE t RENAME a TO c; ALTER TABLE t ALTER c TYPE int USING c * 2; COMMIT"
    ),
    "a renamed column gets a wider type by an expression": (
        "BEGIN; ALTER TABLE t RENAME a TO c; ALTER TABLE t ALTER c TYPE bigint USING c * 2; COMMIT"
    ),
    "a new column gets values": (
        "BEGIN; ALTER TABLE t ADD c int; ALTER TABLE t ALTER c TYPE int USING 7; COMMIT"
    ),
    "a new column gets a default for old rows by a rewrite": (
        "BEGIN; ALTER TABLE t ADD c int; ALTER TABLE t ALTER c TYPE bigint USING a; COMMIT"
    ),
}


@each_major
@pytest.mark.parametrize("statement", ONE_TRANSACTION.values(), ids=ONE_TRANSACTION)
def test_14_a_column_that_one_transaction_alters_twice_has_the_values_of_the_source(
    database: Database, statement: str
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, b int, a int); INSERT INTO t VALUES (1, 2, 3)"
    )
    install(database)
    check(database, statement)


@each_major
def test_14_rows_that_another_event_trigger_writes_before_the_record_are_not_lost(
    database: Database,
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, b int, a int); INSERT INTO t VALUES (1, 2, 3)",
        "CREATE FUNCTION fill() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN UPDATE t SET a = 9; END'",
        # Event triggers fire in the order of their names.
        "CREATE EVENT TRIGGER fill ON ddl_command_end WHEN TAG IN ('ALTER TABLE') EXECUTE PROCEDURE fill()",
    )
    install(database)
    check(database, "ALTER TABLE t DROP a, ADD a int")
    check(database, "ALTER TABLE t DROP b")


@each_major
@pytest.mark.parametrize("kind", ["VIEW", "MATERIALIZED VIEW", "FOREIGN TABLE"])
def test_14_a_column_that_another_command_renames_is_recorded(
    database: Database, kind: str
) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, b int, a int); INSERT INTO t VALUES (1, 2, 3)"
    )
    install(database)
    check(
        database,
        f"BEGIN; ALTER {kind} t RENAME a TO c; ALTER TABLE t ALTER c TYPE int USING c * 2; COMMIT",
    )
    check(database, f"ALTER {kind} t RENAME b TO d; INSERT INTO t VALUES (2, 3, 4)", in_place=True)


@each_major
def test_14_the_columns_of_a_typed_table_are_recorded(database: Database) -> None:
    database.execute(
        "CREATE TYPE kind AS (id int, b int, a int)",
        "CREATE TABLE t OF kind (PRIMARY KEY (id)); INSERT INTO t VALUES (1, 2, 3)",
    )
    install(database)
    check(
        database,
        "BEGIN; ALTER TYPE kind DROP ATTRIBUTE a CASCADE; ALTER TYPE kind ADD ATTRIBUTE a int CASCADE;"
        " INSERT INTO t VALUES (2, 3, 4); ALTER TYPE kind RENAME ATTRIBUTE b TO c CASCADE;"
        " ALTER TABLE t ALTER c SET STATISTICS 5; COMMIT",
    )
    check(database, "ALTER TYPE kind RENAME ATTRIBUTE c TO d CASCADE", in_place=True)
