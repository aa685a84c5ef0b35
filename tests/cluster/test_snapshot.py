"""What the parts of a copy are read from, when their names change under them. Needs no Spark session."""

import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spark_consumers.lake.copy import bootstrap
from spark_consumers.lake.tables.sources import Source
from spark_consumers.snapshot.exported import AwaitedTransaction, ExportedSnapshot, reading
from spark_consumers.sources.snapshot import SnapshotSource
from tests.support.servers import Database, each_major
from tests.support.waiting import wait_for
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.errors import DeadlineError, SnapshotError, TusklineError
from walsender_bridge.postgres.client import replication_connection

SETUP = (
    "CREATE TABLE root (id int, a text, b text) PARTITION BY LIST (id)",
    "CREATE TABLE leaf PARTITION OF root FOR VALUES IN (1)",
    "CREATE TABLE plain (id int, a text, b text)",
    "CREATE TABLE twin (LIKE plain)",
    "INSERT INTO root VALUES (1, 'a', 'b')",
    "INSERT INTO plain VALUES (1, 'a', 'b')",
    "INSERT INTO twin VALUES (2, 'other', 'rows')",
)
ROW = {"id": 1, "a": "a", "b": "b"}
#: A table, what is committed in one transaction before its part is read, and a word of the error.
CHANGES = (
    ("root", "ALTER TABLE leaf RENAME TO older; CREATE TABLE leaf PARTITION OF root FOR VALUES IN (3)", "renamed"),
    ("root", "DROP TABLE leaf; CREATE TABLE leaf PARTITION OF root FOR VALUES IN (1)", "renamed"),
    ("plain", "ALTER TABLE plain RENAME TO x; ALTER TABLE twin RENAME TO plain", "renamed"),
    ("plain", "CREATE SCHEMA s; ALTER TABLE plain SET SCHEMA s; ALTER TABLE twin RENAME TO plain", "renamed"),
    ("root", "TRUNCATE leaf", "truncated"),
    ("root", "ALTER TABLE root RENAME a TO c; ALTER TABLE root RENAME b TO a; ALTER TABLE root RENAME c TO b", "column"),
    ("plain", "ALTER TABLE plain RENAME a TO c; ALTER TABLE plain RENAME b TO a; ALTER TABLE plain RENAME c TO b", "column"),
    ("plain", "ALTER TABLE plain DROP a; ALTER TABLE plain ADD a text", "column"),
    ("plain", "ALTER TABLE plain DROP a; ALTER TABLE plain RENAME b TO a; ALTER TABLE plain ADD b text", "column"),
)  # fmt: skip
HARMLESS = (
    "ALTER TABLE plain ADD n int DEFAULT 7",
    "ALTER TABLE plain ALTER a SET NOT NULL",
    "INSERT INTO plain VALUES (2, 'later', 'row')",
    "CREATE UNIQUE INDEX made ON plain (id)",
    "ALTER TABLE twin RENAME TO triplet",
)


def planned(snapshot: ExportedSnapshot, table: str, publication: str | None = None) -> Any:
    """A reader of the table, which knows its parts."""
    options = {"dsn": snapshot.dsn, "snapshot": snapshot.snapshot, "table": f"public.{table}"}
    if publication is not None:
        options["publication"] = publication
    source = SnapshotSource(options)
    return source.reader_apart(source.schema())


def read(reader: Any) -> list[dict[str, Any]]:
    """Its rows, by the names of the columns in the snapshot."""
    found = []
    for part in reader.partitions():
        for batch in reader.read(part):
            names = ("id", "a", "b")
            found += [{n: row[str(i)] for i, n in enumerate(names)} for row in batch.to_pylist()]
    return found


@each_major
def test_a_part_is_the_relation_and_the_columns_of_the_snapshot_or_an_error(
    database: Database,
) -> None:
    for table, change, word in CHANGES:
        database.execute("DROP SCHEMA public CASCADE; DROP SCHEMA IF EXISTS s CASCADE; CREATE SCHEMA public", *SETUP)  # fmt: skip
        with ExportedSnapshot(database.dsn) as snapshot:
            reader = planned(snapshot, table)
            database.execute(change)
            try:
                found: object = read(reader)
            except TusklineError as error:
                found = error
            assert isinstance(found, SnapshotError), (change, found)
            assert word in found.what, (change, found)


@each_major
def test_what_leaves_names_and_rows_alone_does_not_end_a_copy(database: Database) -> None:
    database.execute(*SETUP)
    with ExportedSnapshot(database.dsn) as snapshot:
        reader = planned(snapshot, "plain")
        database.execute(*HARMLESS)
        assert read(reader) == [ROW]


@pytest.mark.parametrize("pg_server", [15], indirect=True)
def test_schemas_swapped_between_check_and_read_are_noticed(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ALTER SCHEMA waits for nobody who reads a table."""
    database.execute(*SETUP, "CREATE SCHEMA next", "CREATE TABLE next.plain (LIKE plain)")
    with ExportedSnapshot(database.dsn) as snapshot:
        reader = planned(snapshot, "plain")
        batches: Callable[..., Any] = type(reader)._batches

        def swapped(*given: Any) -> Any:
            database.execute(
                "ALTER SCHEMA public RENAME TO old", "ALTER SCHEMA next RENAME TO public"
            )
            yield from batches(*given)

        monkeypatch.setattr(type(reader), "_batches", swapped)
        with pytest.raises(SnapshotError, match="renamed"):
            read(reader)


@pytest.mark.parametrize("pg_server", [15], indirect=True)
def test_a_row_filter_names_the_columns_of_the_snapshot(database: Database) -> None:
    """Its text names columns as they are when it is asked for: here while two have each other's names."""
    swap = "ALTER TABLE plain RENAME a TO c; ALTER TABLE plain RENAME b TO a; ALTER TABLE plain RENAME c TO b"
    database.execute(*SETUP, "CREATE PUBLICATION p FOR TABLE plain WHERE (a = 'a')")
    with ExportedSnapshot(database.dsn) as snapshot:
        database.execute(swap)
        with pytest.raises(SnapshotError, match="column"):
            planned(snapshot, "plain", "p")
        database.execute(swap)
        assert read(planned(snapshot, "plain", "p")) == [ROW]


@pytest.mark.parametrize("pg_server", [15], indirect=True)
def test_a_column_list_that_is_altered_while_a_copy_begins_is_noticed(database: Database) -> None:
    """A publication is what it is by now, in any snapshot; the columns are written in their order."""
    database.execute(*SETUP, "CREATE PUBLICATION p FOR TABLE plain (id, a)")
    with ExportedSnapshot(database.dsn) as snapshot:
        options = {"dsn": snapshot.dsn, "snapshot": snapshot.snapshot}
        source = SnapshotSource({**options, "table": "public.plain", "publication": "p"})
        schema = source.schema()
        database.execute("ALTER PUBLICATION p SET TABLE plain (id, b)")
        for reader in (source.reader, source.reader_apart):
            with pytest.raises(SnapshotError, match=r"\(id, a\) .* \(id, b\)"):
                reader(schema)


@pytest.mark.parametrize("pg_server", [15], indirect=True)
def test_a_table_that_leaves_the_publication_while_a_copy_begins_is_not_published(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.execute(*SETUP, "CREATE PUBLICATION p FOR TABLE plain, twin")
    shapes = bootstrap._shapes

    def later(*given: Any) -> Any:
        database.execute("ALTER PUBLICATION p DROP TABLE plain")
        return shapes(*given)

    status = SimpleNamespace(confirmed_to=1, system_id=1)
    reader = SimpleNamespace(status=lambda: status)
    monkeypatch.setattr(StreamReader, "of", lambda cut: nullcontext(reader))
    monkeypatch.setattr(bootstrap, "check", lambda *given: None)
    monkeypatch.setattr(bootstrap, "_shapes", later)
    found: dict[str, object] = {}
    nothing: Any = SimpleNamespace(forget=lambda path: None)
    copier = bootstrap.TableCopier(nothing, tmp_path, nothing)
    request = bootstrap.CopyRequest(
        Source("shop", database.dsn, "p"), frozenset({"public.plain"}), nothing, 1
    )
    copier.copy(request, found.__setitem__, {})
    assert found == {"shop.public.plain": None}


@each_major
def test_no_timeout_of_the_database_ends_a_snapshot_that_is_read(database: Database) -> None:
    database.execute(*SETUP)
    names = ["idle_in_transaction_session_timeout", "statement_timeout"]
    if database.server.installation.major >= 17:
        names.append("transaction_timeout")
    database.execute(*(f"ALTER DATABASE {database.name} SET {name} = '300ms'" for name in names))
    with ExportedSnapshot(database.dsn) as snapshot:
        with reading(snapshot.dsn, snapshot.snapshot) as connection:
            connection.execute("SELECT pg_sleep(1)")
        assert read(planned(snapshot, "plain")) == [ROW]


@each_major
def test_the_transaction_that_a_snapshot_waits_for_is_named(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication_connection, "_ALIVE_SECONDS", 0.1)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'walsender'"
    told: list[str] = []
    with database.connect() as busy, database.connect() as looking:
        busy.execute("BEGIN; SELECT txid_current()")

        def note(awaited: AwaitedTransaction | None) -> None:
            if awaited is not None:
                told.append(awaited.text)
                busy.execute("ROLLBACK")

        with pytest.raises(
            DeadlineError, match=f"server process {busy.info.backend_pid}"
        ) as raised:
            ExportedSnapshot(database.dsn, timeout=1.0)
        assert f"pg_terminate_backend({busy.info.backend_pid})" in raised.value.repair
        # The server does not go on waiting, with a slot and a walsender.
        wait_for(lambda: looking.execute(waiting).fetchall() == [(0,)], 10, "it has ended")
        with ExportedSnapshot(database.dsn, timeout=30.0, waiting=note) as snapshot:
            assert snapshot.lsn > 0
    assert re.fullmatch(r"the transaction of the server process \d+, which is \d+ s old", told[0])
