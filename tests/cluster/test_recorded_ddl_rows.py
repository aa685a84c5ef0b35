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
            name: value_of(default) if at is None else row[names[at]]
            for name, at, default in zip(columns.names, found.sources, found.defaults, strict=True)
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
                    assert made.old_columns is not None
                    del rows[made.old_columns[columns.names.index("id")][at].as_py()]
                else:
                    rows[row["id"]] = row
    return rows, found.shape


def value_of(default: pa.Scalar | None) -> Any:
    return None if default is None else default.as_py()


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
    with database.connect() as connection:
        if kind == "VIEW" and connection.info.server_version < 130_000:
            pytest.skip("PostgreSQL 11 and 12 have no ALTER VIEW ... RENAME COLUMN")
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


FOLLOWED = (
    "ALTER TABLE t ADD c int DEFAULT 7",
    "ALTER TABLE t ADD c text NOT NULL DEFAULT 'it''s {a, b}, \"c\" and \\ é'",
    "ALTER TABLE t ADD c int DEFAULT 7, ADD d varchar(3) DEFAULT '', DROP b",
    # Each row between the commands has the columns that it had there.
    (
        "BEGIN; INSERT INTO t VALUES (2, 3, 4); ALTER TABLE t ADD c int DEFAULT 7; UPDATE t SET a = 5 WHERE id = 1;"
        " INSERT INTO t VALUES (3, 4, 5, 6), (4, 5, 6, NULL); ALTER TABLE t ALTER c SET DEFAULT 9; INSERT INTO t (id) VALUES (5);"
        " ALTER TABLE t ADD d text DEFAULT 'x'; ALTER TABLE t RENAME c TO e; UPDATE t SET b = 1 WHERE id = 4; COMMIT"
    ),
    "BEGIN; ALTER TABLE t ADD c int DEFAULT 7; ALTER TABLE t DROP c, ADD d int DEFAULT 8; COMMIT",
    # Evaluated once; the settings of the session do not matter.
    (
        "BEGIN; SET LOCAL DateStyle = 'German'; SET LOCAL TimeZone = 'Asia/Tokyo'; SET LOCAL extra_float_digits = -5;"
        " ALTER TABLE t ADD c text DEFAULT now()::date::text, ADD d float8 DEFAULT 0.12345678901234; COMMIT"
    ),
)
COPIED = (
    "ALTER TABLE t ADD c float8 DEFAULT random()",
    "ALTER TABLE t ADD c int GENERATED ALWAYS AS IDENTITY",
    "ALTER TABLE t ADD c serial",
    "ALTER TABLE t ADD c domain_with_default",
    "ALTER TABLE t ADD c bounded DEFAULT 7",
    "ALTER TABLE t ADD c int[] DEFAULT '{1,2}'",
    "ALTER TABLE t ADD c float8 DEFAULT 'NaN'",
    "ALTER TABLE t ADD c timestamptz DEFAULT 'infinity'",
    "ALTER TABLE t ADD c date DEFAULT '0044-03-15 BC'",
    "ALTER TABLE t ADD c text DEFAULT repeat('x', 1001)",
    # The rows are rewritten, and nothing is kept in the catalog.
    "ALTER TABLE t ADD c int DEFAULT 7, ALTER a TYPE bigint USING a + 1",
    "BEGIN; TRUNCATE t; INSERT INTO t VALUES (2, 3, 4); ALTER TABLE t ADD c int DEFAULT 7; COMMIT",
)


@each_major
def test_14_a_new_column_with_a_default_has_the_value_that_the_server_keeps_in_older_rows(
    database: Database,
) -> None:
    for statement in FOLLOWED:
        database.execute(
            f"DROP PUBLICATION IF EXISTS {PUBLICATION}; DROP TABLE IF EXISTS t",
            "CREATE TABLE t (id int PRIMARY KEY, b int, a int); INSERT INTO t VALUES (1, 2, 3)",
        )
        install(database)
        check(database, statement, in_place=True)


@each_major
def test_14_a_default_that_the_server_or_iceberg_does_not_keep_causes_a_copy(
    database: Database,
) -> None:
    database.execute(
        "CREATE DOMAIN domain_with_default int DEFAULT 3; CREATE DOMAIN bounded int CHECK (VALUE > 0)"
    )
    for statement in COPIED:
        database.execute(
            f"DROP PUBLICATION IF EXISTS {PUBLICATION}; DROP TABLE IF EXISTS t",
            "CREATE TABLE t (id int PRIMARY KEY, b int, a int); INSERT INTO t VALUES (1, 2, 3)",
        )
        install(database)
        check(database, statement, in_place=False)


@each_major
def test_14_partitions_have_one_default_or_the_table_is_copied(database: Database) -> None:
    with database.connect() as connection:
        if connection.info.server_version < 130_000:
            pytest.skip("PostgreSQL 11 and 12 publish no partitioned tables")
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, b int) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (0) TO (10); INSERT INTO t VALUES (1, 2)",
        # It has its columns in another order, and so under other numbers.
        "CREATE TABLE t2 (x int, b int, id int NOT NULL); ALTER TABLE t2 DROP x",
        "ALTER TABLE t ATTACH PARTITION t2 FOR VALUES FROM (10) TO (20); INSERT INTO t VALUES (11, 3)",
        f"CREATE PUBLICATION {PUBLICATION} FOR TABLE t WITH (publish_via_partition_root)",
        load("ddl/install"),
    )
    publish = sql.SQL(load("ddl/publish")).format(publication=sql.Identifier(PUBLICATION))
    database.execute(publish.as_string(None))
    check(
        database,
        "ALTER TABLE t ADD c int DEFAULT 7; UPDATE t SET b = 9 WHERE id = 11",
        in_place=True,
    )
