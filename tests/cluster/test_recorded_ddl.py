"""The event trigger that records schema changes, on each major; `tuskline init --record-ddl` and `detach`."""

from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from spark_consumers.decode.entries import decode_entries
from spark_consumers.lake.tables.recorded import DDL_TABLE, TableRecord, records_in
from spark_consumers.lake.tables.sources import Source, read_publication
from tests.support.attached import Attached, difference, server_state
from tests.support.change_entries import Entries
from tests.support.servers import Database, each_major
from tests.support.slot_changes import PUBLICATION, changes_of
from walsender_bridge.runtime.sql import load


def install(database: Database) -> None:
    database.execute(f"CREATE PUBLICATION {PUBLICATION} FOR TABLE t, u", load("ddl/install"))
    publish = sql.SQL(load("ddl/publish")).format(publication=sql.Identifier(PUBLICATION))
    database.execute(publish.as_string(None))


def records(log: Entries) -> list[TableRecord]:
    """All records, in the order of the log."""
    batches = decode_entries(log.entries, log.schemas)
    return [r for b in batches if b.relation.full_name == DDL_TABLE for r in records_in(b)]


def names(record: TableRecord) -> list[str | None]:
    return [column.name for column in record.columns]


@each_major
def test_14_each_change_of_columns_is_recorded_in_its_transaction(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a text, b int)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        "CREATE TABLE unpublished (id int PRIMARY KEY)",
    )
    install(database)
    oid = read_publication(Source("s", database.dsn, PUBLICATION)).shapes["public.t"].oid
    with changes_of(database.dsn) as changes:
        database.execute(
            "BEGIN; INSERT INTO t VALUES (1, 'a', 1); ALTER TABLE t RENAME a TO c; INSERT INTO t VALUES (2, 'c', 2);"
            " SAVEPOINT s; ALTER TABLE t DROP c; ROLLBACK TO s; SAVEPOINT s; ALTER TABLE t DROP b; RELEASE s;"
            " ALTER TABLE t ADD d int, ADD e int DEFAULT 7; COMMIT",
            "ALTER TABLE t ALTER d TYPE bigint",
            "ALTER TABLE unpublished ADD a int; CREATE TEMP TABLE v (a int); ALTER TABLE v DROP a",
            # Nothing of the columns changes.
            "ALTER TABLE t SET (fillfactor = 50)",
            "BEGIN; ALTER TABLE t DROP c; ROLLBACK",
        )
        found = records(changes())
    assert [names(record) for record in found] == [
        ["id", "c", "b"],
        ["id", "c", None],
        ["id", "c", None, "d", "e"],
        ["id", "c", None, "d", "e"],
    ]
    assert {record.relation for record in found} == {oid}
    assert len({record.commit_lsn for record in found[:3]}) == 1
    assert found[0].place < found[1].place < found[2].place < found[3].place
    written = [[column.number for column in r.columns if column.is_written] for r in found]
    # All rows that the transaction has written so far, in subtransactions, too. A rewrite stores a default in the rows.
    assert written == [[2], [2, 3], [2, 3, 4, 5], [4, 5]]
    assert [column.is_filled for column in found[2].columns] == [True, False, False, False, True]
    assert found[3].file != found[2].file == found[0].file
    assert found[3].query == "ALTER TABLE t ALTER d TYPE bigint"
    assert {record.query for record in found[:3]} == {""}


@each_major
def test_14_any_role_may_alter_its_tables_and_gets_no_rights(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a text)", "CREATE TABLE u (id int PRIMARY KEY)"
    )
    install(database)
    role = f"owner_{database.name}"
    # What the role makes runs with its own rights, whatever the function's are.
    planted = (
        "CREATE SCHEMA planted; CREATE FUNCTION planted.age(xid) RETURNS int LANGUAGE sql AS 'SELECT 1/0'",
        f"CREATE ROLE {role}; ALTER TABLE t OWNER TO {role}; GRANT CREATE, USAGE ON SCHEMA planted, public TO {role}",
    )
    with changes_of(database.dsn) as changes:
        try:
            database.execute(
                *planted,
                f"BEGIN; SET LOCAL SESSION AUTHORIZATION {role}; SET LOCAL search_path = planted, public; ALTER TABLE t RENAME a TO b;"
                " CREATE FUNCTION planted.add() RETURNS void LANGUAGE sql AS 'ALTER TABLE t ADD c int';"
                " SELECT planted.add(); COMMIT",
                "BEGIN; SET LOCAL session_replication_role = replica; ALTER TABLE t DROP b; COMMIT",
                # What cannot be recorded fails no command.
                "DROP TABLE tuskline.ddl",
                "ALTER TABLE t ADD d int",
            )
            found = records(changes())
        finally:
            database.execute(
                f"DROP TABLE t; DROP SCHEMA planted CASCADE; DROP OWNED BY {role}; DROP ROLE {role}"
            )
    assert [names(record) for record in found] == [
        ["id", "b"],
        ["id", "b", "c"],
        ["id", None, "c"],
    ]


@each_major
def test_14_a_function_that_another_role_has_left_there_is_not_made_the_trigger(
    database: Database,
) -> None:
    role = f"stranger_{database.name}"
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        f"CREATE ROLE {role}; CREATE SCHEMA tuskline; GRANT CREATE, USAGE ON SCHEMA tuskline TO {role}",
        f"SET SESSION AUTHORIZATION {role}; CREATE FUNCTION tuskline.record_ddl() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'",
    )
    try:
        with pytest.raises(psycopg.errors.RaiseException, match=r"record_ddl belongs to a role"):
            install(database)
    finally:
        database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@each_major
def test_14_the_catalog_tells_whether_the_event_trigger_was_there_all_the_time(
    database: Database,
) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")

    def recorded() -> str:
        return read_publication(Source("s", database.dsn, PUBLICATION)).shapes["public.t"].recorded

    install(database)
    seen = [recorded()]
    assert seen[0] == recorded()
    for off, on in (
        (
            "ALTER EVENT TRIGGER tuskline_ddl DISABLE",
            "ALTER EVENT TRIGGER tuskline_ddl ENABLE ALWAYS",
        ),
        ("DROP EVENT TRIGGER tuskline_ddl", load("ddl/install")),
        (
            f"ALTER PUBLICATION {PUBLICATION} DROP TABLE tuskline.ddl",
            f"ALTER PUBLICATION {PUBLICATION} ADD TABLE tuskline.ddl",
        ),
        (
            "ALTER EVENT TRIGGER tuskline_ddl ENABLE",
            "ALTER EVENT TRIGGER tuskline_ddl ENABLE ALWAYS",
        ),
    ):
        database.execute(off)
        assert recorded() == ""
        database.execute(on)
        seen.append(recorded())
    # Another function under its name.
    database.execute(
        "CREATE OR REPLACE FUNCTION tuskline.record_ddl() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'"
    )
    seen.append(recorded())
    assert all(seen)
    assert len({*seen}) == len(seen)


@each_major
def test_14_a_lock_of_another_published_table_delays_no_schema_change(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        "CREATE TABLE unpublished (id int)",
    )
    install(database)
    with changes_of(database.dsn) as changes, database.connect() as other:
        other.autocommit = False
        other.execute("LOCK TABLE u")
        database.execute(
            "SET statement_timeout = '5s'",
            "ALTER TABLE t ADD c int",
            "ALTER TABLE unpublished ADD c int",
        )
        other.rollback()
        found = records(changes())
    assert [names(record) for record in found] == [["id", "c"]]


@each_major
def test_14_a_change_is_recorded_although_ages_were_asked_for_before_it(database: Database) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)")
    install(database)
    with changes_of(database.dsn) as changes, psycopg.connect(database.dsn) as connection:
        # From here on, the transaction has the server's next ID for its own, whichever it gets.
        connection.execute("SELECT age(xmin) FROM pg_class LIMIT 1")
        database.execute("SELECT txid_current()", "SELECT txid_current()")
        connection.execute("ALTER TABLE t ADD c int")
        connection.commit()
        (found,) = records(changes())
    assert [(column.name, column.is_written) for column in found.columns] == [
        ("id", False),
        ("c", True),
    ]


@each_major
def test_14_partitions_are_recorded_as_the_publication_sends_them(database: Database) -> None:
    with database.connect() as connection:
        if connection.info.server_version < 130_000:
            pytest.skip("PostgreSQL 11 and 12 publish no partitioned tables")
    database.execute(
        "CREATE TABLE t (id int) PARTITION BY LIST (id)",
        "CREATE TABLE u PARTITION OF t FOR VALUES IN (1) PARTITION BY LIST (id)",
        "CREATE TABLE u1 PARTITION OF u FOR VALUES IN (1)",
        f"CREATE PUBLICATION {PUBLICATION} FOR TABLE t WITH (publish_via_partition_root = true)",
        load("ddl/install"),
        f"ALTER PUBLICATION {PUBLICATION} ADD TABLE tuskline.ddl",
    )
    with database.connect() as connection:
        row = connection.execute("SELECT 't'::regclass::int, 'u1'::regclass::int").fetchone()
    assert row is not None
    with changes_of(database.dsn) as changes:
        database.execute("ALTER TABLE t ADD a int")
        assert {record.relation for record in records(changes())} == {row[0]}
        database.execute(
            f"ALTER PUBLICATION {PUBLICATION} SET (publish_via_partition_root = false)",
            "ALTER TABLE t ADD b int",
        )
        sent = {record.relation for record in records(changes())}
    assert {*row} <= sent


@each_major
def test_14_a_change_of_a_partitioned_table_is_recorded_of_partitions_that_are_published_themselves(
    database: Database,
) -> None:
    """The only way to publish them on PostgreSQL 11 and 12."""
    database.execute(
        "CREATE TABLE t (id int NOT NULL, a int) PARTITION BY LIST (id)",
        "CREATE TABLE t1 PARTITION OF t (PRIMARY KEY (id)) FOR VALUES IN (1)",
        "CREATE TABLE t2 PARTITION OF t FOR VALUES IN (2) PARTITION BY LIST (id)",
        "CREATE TABLE t21 PARTITION OF t2 (PRIMARY KEY (id)) FOR VALUES IN (2)",
        "CREATE TABLE t3 PARTITION OF t (PRIMARY KEY (id)) FOR VALUES IN (3)",
        f"CREATE PUBLICATION {PUBLICATION} FOR TABLE t1, t21",
        load("ddl/install"),
        f"ALTER PUBLICATION {PUBLICATION} ADD TABLE tuskline.ddl",
    )
    with database.connect() as connection:
        row = connection.execute("SELECT 't1'::regclass::int, 't21'::regclass::int").fetchone()
    assert row is not None
    with changes_of(database.dsn) as changes:
        database.execute("ALTER TABLE t RENAME a TO b", "ALTER TABLE t ADD c int DEFAULT 7")
        found = records(changes())
    by_table = {oid: [names(r) for r in found if r.relation == oid] for oid in row}
    assert by_table == {oid: [["id", "b"], ["id", "b", "c"]] for oid in row}
    assert {record.relation for record in found} == {*row}


@each_major
def test_init_has_schema_changes_recorded_and_detach_takes_it_back(
    tmp_path: Path, shop: Database
) -> None:
    before = server_state(shop.dsn)
    tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": ("public.orders",)}})
    tuskline.json("init")
    found = {f["check"]: f for f in tuskline.json("doctor", code=0)["findings"]}
    assert "--record-ddl" in found["schema changes"]["what"]
    made = tuskline.json("init", "--record-ddl")["created"]
    assert [row["created"] for row in made] == ["event trigger tuskline_ddl"]
    assert tuskline.json("init", "--record-ddl")["created"] == []
    with shop.connect() as connection:
        row = connection.execute(
            "SELECT evtenabled FROM pg_event_trigger WHERE evtname = 'tuskline_ddl'"
        ).fetchone()
    assert row == ("A",)
    assert "recorded: columns that are added" in str(tuskline.json("doctor", code=0)["findings"])
    taken = {row["removed"] for row in tuskline.json("detach")["removed"]}
    assert "event trigger tuskline_ddl" in taken
    assert difference(before, server_state(shop.dsn)) == []


#: An earlier version's text, which converted missing values with others' casts; one whose names another schema may define; and another's rights.
_OTHER_FUNCTIONS = (
    (
        "CASE WHEN NOT a.atthasmissing THEN to_jsonb(a) ->> 'attgenerated' END",
        "to_jsonb(a) ->> 'attgenerated'",
    ),
    (" SET search_path = pg_catalog, pg_temp", ""),
    (" SECURITY DEFINER", ""),
)


@each_major
@pytest.mark.parametrize(("text", "other"), _OTHER_FUNCTIONS, ids=["text", "path", "rights"])
def test_doctor_warns_of_another_version_s_recording_and_init_replaces_it(
    tmp_path: Path, shop: Database, text: str, other: str
) -> None:
    tuskline = Attached(tmp_path, {"shop": {"dsn": shop.dsn, "tables": ("public.orders",)}})

    def found() -> tuple[str, str]:
        findings = tuskline.json("doctor", code=0)["findings"]
        (finding,) = [f for f in findings if f["check"] == "schema changes"]
        return finding["what"], finding["repair"]

    tuskline.json("init")
    tuskline.json("init", "--record-ddl")
    assert found()[0].startswith("recorded: ")
    assert text in load("ddl/install")
    shop.execute(load("ddl/install").replace(text, other))
    what, repair = found()
    assert "tuskline.record_ddl is not this version's" in what
    assert "tuskline init --record-ddl" in repair
    assert tuskline.json("init", "--record-ddl")["created"] != []
    assert found()[0].startswith("recorded: ")
    # The function is replaced also where the event trigger is missing.
    shop.execute(load("ddl/install").replace(text, other), "DROP EVENT TRIGGER tuskline_ddl")
    assert "not this version's" in found()[0]
    tuskline.json("detach")
