"""What the parts of a copy are read from, when their names change under them. Needs no Spark session."""

import contextlib
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from spark_consumers.decode import types
from spark_consumers.lake.copy import bootstrap
from spark_consumers.lake.copy.chunk import KnownSamples, next_chunk
from spark_consumers.lake.tables.sources import Source
from spark_consumers.snapshot import exported
from spark_consumers.snapshot.driver_copy import DriverCopy
from spark_consumers.snapshot.exported import (
    AwaitedTransaction,
    ExportedSnapshot,
    PublishedTable,
    one_table,
    reading,
    relations_of,
)
from spark_consumers.snapshot.plain_copy import PlainCopy
from spark_consumers.sources.snapshot import _BINARY, SnapshotSource, converted
from tests.support.servers import Database, MakeServer, each_major
from tests.support.tls import Authority
from tests.support.waiting import wait_for
from walsender_bridge.change_log.stream_reader import StreamReader
from walsender_bridge.demo.local_server import Installation, LocalServer, by_major
from walsender_bridge.errors import DeadlineError, SnapshotError, TusklineError
from walsender_bridge.postgres.client import replication_connection
from walsender_bridge.postgres.client.bounded_query import BoundedConnection
from walsender_bridge.runtime.sql import load

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


def test_a_snapshot_waits_until_the_server_knows_of_its_commits(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit is in the WAL, of which the snapshot is made, before its transaction has ended: here it waits for a standby."""
    monkeypatch.setattr(replication_connection, "_ALIVE_SECONDS", 0.1)
    server = make_server()
    server.start()
    dsn = server.dsn()
    with contextlib.ExitStack() as stack:
        old, middle, late, looking = (
            stack.enter_context(psycopg.connect(dsn, autocommit=True)) for _ in range(4)
        )
        looking.execute("CREATE TABLE t (id int)")
        looking.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
        looking.execute("SELECT pg_reload_conf()")
        wait_for(
            lambda: _one(late, "SHOW synchronous_standby_names") == "nobody", 10, "the setting"
        )
        late.execute("SET synchronous_commit = on")
        old.execute("BEGIN; SELECT txid_current()")
        names = {each.info.backend_pid: name for each, name in ((old, "old"), (middle, "middle"), (late, "late"))}  # fmt: skip
        commit = threading.Thread(target=late.execute, args=("INSERT INTO t VALUES (1)",))
        told: list[str] = []

        def note(awaited: AwaitedTransaction | None) -> None:
            pid = re.search(r"server process (\d+)", awaited.text) if awaited else None
            if pid is None or (name := names[int(pid[1])]) in told:
                return
            told.append(name)
            if name == "old":
                # It runs when the server begins to record which transactions commit, and is waited for, too.
                middle.execute("BEGIN; SELECT txid_current()")
                old.execute("ROLLBACK")
            elif name == "middle":
                commit.start()
                waits = (
                    f"SELECT wait_event FROM pg_stat_activity WHERE pid = {late.info.backend_pid}"
                )
                wait_for(lambda: _one(looking, waits) == "SyncRep", 10, "the commit is written")
                middle.execute("ROLLBACK")
            else:
                looking.execute(f"SELECT pg_cancel_backend({late.info.backend_pid})")

        with ExportedSnapshot(dsn, timeout=60.0, waiting=note) as snapshot:
            commit.join()
            with reading(dsn, snapshot.snapshot) as connection:
                assert _one(connection, "SELECT count(*) FROM public.t") == 1
        assert told == ["old", "middle", "late"]


def _one(connection: psycopg.Connection[Any], query: str) -> Any:
    rows = connection.execute(query.encode()).fetchall()
    return rows[0][0]


def test_a_snapshot_of_the_same_name_is_not_read_for_another(make_server: MakeServer) -> None:
    """After a restart the server gives the same names again, and another copy may have exported one.

    A name is made of the number of the server's process and a count: with these settings nothing but this test has such processes.
    """
    server = make_server(autovacuum="off", max_logical_replication_workers="0")
    server.start()

    def execute(*statements: str) -> None:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    execute(*SETUP)
    server.restart()
    with ExportedSnapshot(server.dsn()) as first:
        options = {"dsn": first.dsn, "snapshot": first.snapshot, "table": "public.plain"}
        readers = []
        for slot in (first.slot, ""):
            source = SnapshotSource(options, slot=slot)
            readers.append(source.reader_apart(source.schema()))
        assert read(readers[0]) == [ROW]
        execute("DELETE FROM plain")
        server.kill()
    for _ in range(20):
        server.start()
        with ExportedSnapshot(server.dsn()) as second:
            if second.snapshot != first.snapshot:
                server.kill()
                continue
            with pytest.raises(SnapshotError, match="no longer exported"):
                read(readers[0])
            assert read(readers[1]) == []
            return
    pytest.fail("another name each time")


@each_major
def test_a_table_whose_chunks_no_index_finds_is_read_as_a_whole(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id bigint, tenant int, note text, PRIMARY KEY (tenant, id))",
        "INSERT INTO t SELECT g, g / 1000, repeat('x', 100) FROM generate_series(1, 3000) g",
    )
    for index, is_chunked in (
        ("ANALYZE", False),
        ("CREATE INDEX ON t (id) WHERE id > 5", False),
        ("CREATE INDEX ON t USING brin (id)", False),
        ("CREATE INDEX ON t (id, tenant)", True),
    ):
        database.execute(index)
        with (
            ExportedSnapshot(database.dsn) as snapshot,
            reading(snapshot.dsn, snapshot.snapshot) as connection,
        ):
            table = one_table(connection, "public.t", None)
            assert table.key == ("id", "tenant")
            found = next_chunk(
                connection, table, None, size=10 * 8192, piece=5 * 8192, known=KnownSamples()
            )
            assert (found is not None) == is_chunked, index
            # Nothing would divide what one tenant has.
            by_tenant = replace(table, key=("tenant", "id"))
            for blocks in (10, 25):
                found = next_chunk(
                    connection,
                    by_tenant,
                    None,
                    size=blocks * 8192,
                    piece=5 * 8192,
                    known=KnownSamples(),
                )
                assert (found is not None) == (blocks == 25)


def test_a_relation_is_sampled_once_until_it_has_another_size(database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, pad text)",
        "INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 1000) g",
    )
    known, found = KnownSamples(), []
    for statement in (
        "SELECT 1",
        "INSERT INTO t VALUES (-1)",
        "INSERT INTO t SELECT 2000 + id, pad FROM t",
    ):
        database.execute(statement)
        with (
            ExportedSnapshot(database.dsn) as snapshot,
            reading(snapshot.dsn, snapshot.snapshot) as connection,
        ):
            relations = relations_of(connection, one_table(connection, "public.t", None))
            (sample,) = known.of(connection, relations, "id", piece=8192, is_uuid=False)
        assert sample.size == relations[0].blocks * 8192
        found.append(sample.keys)
    assert found[0] is found[1]
    assert len(found[2]) > len(found[1])


def test_the_sample_of_a_large_table_may_take_its_time(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedConnection, "limit", 2.0)
    database.execute(
        "CREATE FUNCTION slow(int) RETURNS int LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(3); RETURN $1; END'",
        "CREATE TABLE t (id int PRIMARY KEY)",
        "INSERT INTO t SELECT generate_series(1, 100)",
    )
    with (
        ExportedSnapshot(database.dsn) as snapshot,
        reading(snapshot.dsn, snapshot.snapshot) as connection,
    ):
        relations = relations_of(connection, one_table(connection, "public.t", None))
        monkeypatch.setattr(exported, "load", _slowly)
        (sample,) = exported.samples(connection, relations, "id", piece=8192)
        assert sample.keys.tolist() == [1]
        with pytest.raises(DeadlineError):
            connection.execute("SELECT pg_sleep(30)")


def _slowly(name: str) -> str:
    """The query, on a server that takes longer for it than for others."""
    return load(name).replace("min({column})", "public.slow(min({column}))")


#: Values that look like messages, and the ends of their types.
VALUES = """
    CREATE TABLE kinds AS SELECT g AS id, g::int2 AS small, -g::int8 AS large, g % 2 = 0 AS flag,
        decode('640000002000080d', 'hex') AS raw, (ARRAY[0.5, 'NaN', '-infinity', '-0', NULL])[1 + g % 5]::float8 AS float,
        g::float4 AS single, repeat('d', g % 7) AS text, 'x'::char(5) AS padded, g::varchar AS vary,
        '2024-01-01'::date - g * 10 AS day, '1999-12-31 23:59:59.999999'::timestamp + g * interval '1 day' AS moment,
        (CASE g % 3 WHEN 0 THEN NULL ELSE '2024-01-01 00:00+00' END)::timestamptz AS zoned,
        g::numeric(20, 3) AS exact, ARRAY[g, NULL] AS list, gen_random_uuid() AS uuid
    FROM generate_series(1, 30000) g
"""


def both(dsn: str, query: str, oids: list[int | None]) -> tuple[pa.Table, pa.Table]:
    """The rows as each kind of session reads them."""
    found = []
    for connect in (PlainCopy.connect, DriverCopy):
        session = connect(dsn)
        assert session is not None
        with session:
            batches = list(session.batches(query, oids))
            # The session knows that the COPY is over.
            assert session.rows("SELECT 1") == [(1,)]
        found.append(pa.Table.from_batches([rename(batch) for batch in batches]))
    return found[0], found[1]


def rename(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(batch.columns, [str(i) for i in range(batch.num_columns)])


@each_major
def test_both_kinds_of_session_read_the_same(database: Database) -> None:
    database.execute(VALUES.replace("gen_random_uuid()", "md5(g::text)::uuid"))
    with reading_table(database, "kinds") as table:
        columns = [c.column for c in table.read_columns if c.column.type_oid in _BINARY]
    oids: list[int | None] = [column.type_oid for column in columns]
    names = ", ".join(column.name for column in columns)
    assert len(columns) == 13
    ours, theirs = both(database.dsn, f"SELECT {names} FROM public.kinds", oids)
    for i, column in enumerate(columns):
        of_kind = partial(converted, type_oid=column.type_oid, typmod=column.typmod)
        pair = [of_kind(t.column(i).combine_chunks()) for t in (ours, theirs)]
        assert pair[0].type == pair[1].type
        assert [repr(v) for v in pair[0].to_pylist()] == [repr(v) for v in pair[1].to_pylist()]


@contextlib.contextmanager
def reading_table(database: Database, name: str) -> Iterator[PublishedTable]:
    with ExportedSnapshot(database.dsn) as snapshot, reading(snapshot.dsn, snapshot.snapshot) as it:
        yield one_table(it, f"public.{name}", None)


def test_rows_larger_than_the_buffer_are_read(database: Database) -> None:
    database.execute(
        "CREATE TABLE wide AS SELECT g AS id, repeat('d', g * 6000000) AS body FROM generate_series(0, 4) g"
    )
    ours, theirs = both(
        database.dsn, "SELECT id, body FROM public.wide ORDER BY id", [types.INT4, None]
    )
    assert ours.to_pylist() == theirs.to_pylist()
    assert [len(text) for text in ours["1"].to_pylist()] == [g * 6_000_000 for g in range(5)]


def test_what_the_server_refuses_in_the_middle_is_named(database: Database) -> None:
    session = PlainCopy.connect(database.dsn)
    assert session is not None
    with session, pytest.raises(TusklineError, match="division by zero"):
        list(session.batches("SELECT 1 / (g - 50000) FROM generate_series(1, 60000) g", [23]))


def test_a_connection_with_tls_is_read_by_libpq(make_server: MakeServer, tmp_path: Path) -> None:
    major = next((m for m, found in by_major().items() if is_built_with_tls(found)), None)
    if major is None:
        pytest.skip("no PostgreSQL here is built with TLS")
    server = make_server(major, ssl="on")
    issued = Authority(tmp_path).issue("log-server", hosts=("127.0.0.1",))
    owner = server.data_dir.stat()
    for name, source in (("server.crt", issued.certificate), ("server.key", issued.key)):
        target = server.data_dir / name
        target.write_bytes(source.read_bytes())
        target.chmod(0o600)
        os.chown(target, owner.st_uid, owner.st_gid)
    server.start()
    execute_on(server, "CREATE TABLE t AS SELECT 1 AS id", "CREATE PUBLICATION p FOR TABLE t")
    for mode, is_plain in (("disable", True), ("require", False)):
        dsn = server.dsn(sslmode=mode)
        session = PlainCopy.connect(dsn)
        assert (session is not None) == is_plain
        if session is not None:
            session.close()
        with ExportedSnapshot(dsn) as snapshot:
            table = SnapshotSource({"dsn": dsn, "snapshot": snapshot.snapshot, "table": "public.t"})
            reader = table.reader(table.schema())
            (part,) = reader.partitions()
            found = [batch for batch in reader.read(part) if isinstance(batch, pa.RecordBatch)]
            assert [batch.to_pylist() for batch in found] == [[{"id": 1}]]


def is_built_with_tls(installation: Installation) -> bool:
    command = [str(installation.tool("pg_config")), "--configure"]
    return "ssl" in subprocess.run(command, capture_output=True, text=True, check=True).stdout


def execute_on(server: LocalServer, *statements: str) -> None:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())
