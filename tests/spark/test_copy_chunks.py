"""A large table is copied in chunks of its key, each from a snapshot of its own, while it is written, and copies are killed."""

import contextlib
import json
import signal
import threading

import pytest
from psycopg.errors import UniqueViolation

from spark_consumers import Source, read
from spark_consumers.lake.copy import bootstrap
from spark_consumers.lake.flush import flush
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.writer.leases import Leases
from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import Pipeline
from tests.support.stack import Stack
from tests.support.waiting import wait_for

NAME = f"{STREAM}.public.events"
CHUNK = 1 << 20
ROWS = 20_000
TABLES = (
    "CREATE TABLE events (id bigint PRIMARY KEY, n int NOT NULL, body text, long text)",
    "ALTER TABLE events ALTER long SET STORAGE EXTERNAL",
    f"INSERT INTO events SELECT g, 0, repeat(md5(g::text), 6), NULL FROM generate_series(1, {ROWS}) g",
    "CREATE TABLE small (id int PRIMARY KEY)",
    "INSERT INTO small SELECT generate_series(1, 10)",
)

#: A key of the last chunk becomes one of the first, with a value that is not sent.
UNSENT = """
    INSERT INTO events VALUES (400000, 0, '', repeat('x', 9000));
    UPDATE events SET id = -400000 WHERE id = 400000
"""


def changes(turn):
    """What is committed between two chunks: in those that are read, in those that are not, and from one to the other."""
    return (
        f"UPDATE events SET n = n + 1 WHERE id % 97 = {turn}",
        f"DELETE FROM events WHERE id % 1001 = {turn}",
        f"INSERT INTO events SELECT g, {turn}, 'new', NULL FROM generate_series({-turn * 10 - 9}, {-turn * 10}) g",
        f"INSERT INTO events VALUES ({100_000 + turn}, 1, 'behind', NULL)",
        f"UPDATE events SET id = id + 200000 WHERE id % 1003 = {turn}",
        f"UPDATE events SET id = -{1000 + turn} WHERE id = (SELECT max(id) FROM events WHERE id < {ROWS})",
        f"INSERT INTO events VALUES ({300_000 + turn}, 0, 'long', repeat('{turn}', 9000))",
        "UPDATE events SET n = n + 1 WHERE id >= 300000",
    )


#: The same with keys that are UUIDs in the order of time, as of version 7.
UUID_TABLES = (
    """CREATE FUNCTION key(bigint) RETURNS uuid LANGUAGE sql IMMUTABLE AS
    $$ SELECT (lpad(to_hex($1 + 1000000000000), 12, '0') || '70008' || substr(md5($1::text), 1, 15))::uuid $$""",
    "CREATE TABLE events (id uuid PRIMARY KEY, num bigint UNIQUE, n int NOT NULL, body text)",
    f"INSERT INTO events SELECT key(g), g, 0, repeat(md5(g::text), 6) FROM generate_series(1, {ROWS}) g",
    "CREATE TABLE small (id int PRIMARY KEY)",
)


def changes_of_uuids(turn):
    return (
        f"UPDATE events SET n = n + 1 WHERE num % 97 = {turn}",
        f"DELETE FROM events WHERE num % 1001 = {turn}",
        f"INSERT INTO events SELECT key(g), g, {turn}, 'new' FROM generate_series({-turn * 10 - 9}, {-turn * 10}) g",
        f"INSERT INTO events VALUES (key({100_000 + turn}), {100_000 + turn}, 1, 'behind')",
        f"UPDATE events SET id = key(num + 200000), num = num + 200000 WHERE num % 1003 = {turn}",
    )


@pytest.fixture
def between(monkeypatch, database, request):
    """Each chunk has its own snapshot; between two of them come `changes`, and what a test adds. The chunks that there were."""
    seen = []
    more: dict[int, tuple[str, ...]] = {}
    made = getattr(request, "param", changes)
    really = bootstrap.TableCopier._with_next

    def with_next(copier, table, before, *given):
        if table.published.name == "events":
            seen.append(before.chunks)
            # After the chunk's snapshot, before the next one's.
            database.execute(*made(len(seen)), *more.pop(len(seen), ()))
        return really(copier, table, before, *given)

    monkeypatch.setattr(bootstrap, "SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr(bootstrap.TableCopier, "_with_next", with_next)
    return seen, more


def pipeline_of(spark, folder, database, tables=TABLES):
    database.execute(*tables)
    return Pipeline(spark, folder, database, tables=("public.events", "public.small"))


@pytest.mark.parametrize(
    ("between", "tables"),
    [
        (changes, TABLES),
        pytest.param(changes_of_uuids, UUID_TABLES, marks=pytest.mark.long),
    ],
    ids=["integers", "uuids"],
    indirect=["between"],
)
def test_21_a_table_copied_in_chunks_is_the_table(spark, tmp_path, database, between, tables):
    seen, _ = between
    made = changes if tables is TABLES else changes_of_uuids
    with pipeline_of(spark, tmp_path, database, tables) as pipeline:
        house = pipeline.lakehouse(copy_chunk_bytes=CHUNK)
        partial = 0

        def shown():
            nonlocal partial
            house.run_once(force=True)
            copy = pipeline.head().copies.get(NAME)
            partial = max(partial, len(copy.chunks) if copy is not None and copy.is_partial else 0)
            return NAME in pipeline.head().tables

        wait_for(shown, 300, "the table")
        assert_equal(database.dsn, pipeline.flush(house))
        assert partial
        assert len(seen) >= 3
        lsns = [lsn for _, lsn in seen[-1]]
        assert lsns == sorted(set(lsns))
        assert pipeline.head().tables[NAME].chunks == ()
        # It follows.
        database.execute(*made(50))
        assert_equal(database.dsn, pipeline.flush(house))
        assert_no_orphans(spark, pipeline.lake)


def test_21_a_driver_that_takes_over_a_copy_in_chunks_renews_its_lease(
    spark, tmp_path, database, between
):
    with pipeline_of(spark, tmp_path, database) as pipeline:
        house = pipeline.lakehouse(copy_chunk_bytes=CHUNK)

        def begun():
            house.run_once(force=True)
            copy = pipeline.head().copies.get(NAME)
            return copy is not None and copy.is_partial

        wait_for(begun, 200, "the first chunk")
        house.close()
        copy, state = pipeline.head().copies[NAME], pipeline.log.repository._state
        (name,) = (each for each in state.consumers if "-copy-" in each)
        # Epochs that come meanwhile need less of the log than the copy.
        database.execute(*changes(60))
        pipeline.barrier()
        later = pipeline.lakehouse(copy_chunk_bytes=CHUNK)
        later._leases = Leases(seconds=2.0)
        seen = set()

        def renewed():
            later.run_once(force=True)
            if pipeline.head().copies.get(NAME) is not None:
                lease = state.consumers[name]
                needed = state.streams[STREAM].needed_from(lease.version)
                assert needed is None or needed.end <= copy.offset
                seen.add(lease.until)
            return len(seen) > 2

        wait_for(renewed, 100, "the lease is renewed")
        assert pipeline.head().copies[NAME].path == copy.path

        def shown():
            later.run_once(force=True)
            return NAME in pipeline.head().readable

        wait_for(shown, 300, "the table")
        assert_equal(database.dsn, pipeline.flush(later))
        assert name not in state.consumers


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("TRUNCATE events", "it was truncated while it was copied"),
        (UNSENT, "without an unchanged TOAST value"),
        ("ALTER TABLE events ADD extra int", "its columns or its key have changed"),
    ],
    ids=["truncated", "key with a value not sent", "other columns"],
)
def test_21_what_chunks_cannot_follow_is_copied_again(
    spark, tmp_path, database, between, capsys, change, said
):
    seen, more = between
    more[3] = tuple(change.split(";"))
    with pipeline_of(spark, tmp_path, database) as pipeline:
        house = pipeline.lakehouse(copy_chunk_bytes=CHUNK)
        wait_for(
            lambda: house.run_once(force=True) and NAME in pipeline.head().readable,
            400,
            "the table",
        )
        assert seen.count(()) >= 2
        assert_equal(database.dsn, pipeline.flush(house))
        assert said in "".join(capsys.readouterr())


def head(stack):
    found = open_chain(stack.lake).head()
    assert found is not None
    return found


def lines(stack, words):
    text = (stack.directory / "lake.log").read_text(errors="replace")
    return [line for line in text.splitlines() if all(word in line for word in words)]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_21_a_killed_driver_reads_no_finished_chunk_again(spark, tmp_path, database):
    database.execute(*TABLES)
    stop = threading.Event()

    def load():
        with database.connect() as connection:
            turn = 0
            while not stop.wait(0.2):
                turn += 1
                for statement in changes(turn % 90):
                    with contextlib.suppress(UniqueViolation):
                        connection.execute(statement)

    writer = threading.Thread(target=load)
    settings = f"copy_chunk_bytes = {CHUNK}\n"
    with Stack(tmp_path, {STREAM: database.dsn}, epoch_interval=0.5, lake=settings) as stack:
        stack.start("log-server", "bridge")
        writer.start()
        try:
            for fail_point in ("chunk-copied", "copy-kept", "copy-kept"):
                stack.start("lake", env={"TUSKLINE_FAIL_POINT": fail_point})
                assert stack.wait("lake", 200) == -signal.SIGKILL
            kept = head(stack).copies[NAME]
            assert kept.is_partial
            stack.start("lake")
            wait_for(lambda: NAME in head(stack).tables, 200, "the table")
        finally:
            stop.set()
            writer.join()
        assert head(stack).tables[NAME].path == kept.path
        flush(
            stack.lake,
            stack.log_address,
            [Source(STREAM, database.dsn, f"tuskline_{STREAM}")],
            timeout=90,
        )
        shown = json.loads(stack.cli("table", "list", "--json").stdout.splitlines()[-1])["tables"]
        assert {row["state"] for row in shown} == {"live"}
        assert stack.stop("lake") == 0
        assert_equal(database.dsn, read(spark, stack.lake))
        assert_no_orphans(spark, stack.lake)
        assert not lines(stack, ["copy begins again"])
        assert len(lines(stack, ["chunk of table copied"])) <= len(kept.chunks) + 12
