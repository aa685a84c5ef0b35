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
from spark_consumers.lake.writer import table_work
from spark_consumers.lake.writer.leases import Leases
from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import Pipeline
from tests.support.servers import MAJORS_IN_TURN
from tests.support.stack import Stack
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.errors import UnavailableError

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


@pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True)
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
    spark, tmp_path, database, between, monkeypatch
):
    goes_on = threading.Event()
    really = bootstrap.TableCopier._with_next

    def with_next(copier, *given):
        assert goes_on.wait(200)
        return really(copier, *given)

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
        # The copy is not complete before its lease was renewed several times.
        monkeypatch.setattr(bootstrap.TableCopier, "_with_next", with_next)
        seen = set()

        def renewed():
            later.run_once(force=True)
            if pipeline.head().copies.get(NAME) is not None:
                lease = state.consumers[name]
                needed = state.streams[STREAM].needed_from(lease.version)
                assert needed is None or needed.end <= copy.offset
                seen.add(lease.until)
            return len(seen) > 2

        try:
            wait_for(renewed, 100, "the lease is renewed")
        finally:
            goes_on.set()
        assert pipeline.head().copies[NAME].path == copy.path

        def shown():
            later.run_once(force=True)
            return NAME in pipeline.head().readable

        wait_for(shown, 300, "the table")

        def released():
            # With an epoch behind the end of the copier, which may come after that of its last table.
            database.execute("UPDATE small SET id = -id")
            pipeline.flush(later)
            return name not in state.consumers

        wait_for(released, 60, "the log is not kept any more")
        assert_equal(database.dsn, pipeline.flush(later))


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


def shown(pipeline, house):
    """Run rounds until the table is shown, and be current."""
    wait_for(
        lambda: house.run_once(force=True) and NAME in pipeline.head().readable, 400, "the table"
    )
    return pipeline.flush(house)


def step_of(monkeypatch, step):
    """Have `step(before, chunk, read)` read each chunk of the table, of which `before` is there."""
    really = bootstrap.TableCopier._with_next

    def with_next(copier, table, before, chunk, progress):
        def read():
            return really(copier, table, before, chunk, progress)

        return step(before, chunk, read) if table.published.name == "events" else read()

    monkeypatch.setattr(bootstrap.TableCopier, "_with_next", with_next)
    monkeypatch.setattr(table_work, "_AFTER_FAILURE", 0.5)


def test_21_a_chunk_that_failed_behind_its_commit_is_read_again(
    spark, tmp_path, database, between, monkeypatch
):
    """Rows have changed when it is: the commit of the first attempt is of an earlier snapshot."""
    really = bootstrap.TableCopier._indexed
    failures = iter([UnavailableError("No space left on device")])

    def indexed(copier, name, *given):
        made = really(copier, name, *given)
        if name == NAME and (error := next(failures, None)) is not None:
            raise error
        return made

    monkeypatch.setattr(bootstrap.TableCopier, "_indexed", indexed)
    monkeypatch.setattr(table_work, "_AFTER_FAILURE", 0.5)
    with pipeline_of(spark, tmp_path, database) as pipeline:
        house = pipeline.lakehouse(copy_chunk_bytes=CHUNK)
        assert_equal(database.dsn, shown(pipeline, house))
        assert next(failures, None) is None
        assert_no_orphans(spark, pipeline.lake)


@pytest.mark.long
def test_21_a_chunk_is_kept_that_comes_with_the_failure_of_the_next(
    spark, tmp_path, database, between, monkeypatch
):
    """A round of the writer lasts: it takes a chunk when the server, or the session with the snapshot, has ended."""
    seen, _ = between
    linked, failed = threading.Event(), threading.Event()

    def step(before, chunk, read):
        if len(before.chunks) == 2:
            assert linked.wait(300)
        if len(before.chunks) == 3 and not failed.is_set():
            database.execute(
                "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name LIKE 'tuskline_snapshot%' AND database = current_database()"
            )
            try:
                return read()
            finally:
                failed.set()
        return read()

    step_of(monkeypatch, step)
    with pipeline_of(spark, tmp_path, database) as pipeline:
        house = pipeline.lakehouse(copy_chunk_bytes=CHUNK)

        def has_two():
            house.run_once(force=True)
            copy = pipeline.head().copies.get(NAME)
            return copy is not None and len(copy.chunks) == 2

        wait_for(has_two, 300, "two chunks")
        linked.set()
        assert failed.wait(300)
        assert_equal(database.dsn, shown(pipeline, house))
        # What is read next to the failed chunk is that chunk.
        assert [len(chunks) for chunks in seen][:5] == [0, 1, 2, 3, 3]


@pytest.mark.long
def test_21_the_log_is_kept_for_chunks_of_an_earlier_writer(
    spark, tmp_path, database, between, monkeypatch
):
    leases: dict[str, int] = {}
    register = LogClient.register_consumer
    over = threading.Event()

    def noted(client, name, version, seconds):
        leases[name] = version
        return register(client, name, version, seconds)

    def step(before, chunk, read):
        if len(before.chunks) == 1:
            assert over.wait(300)
        return read()

    monkeypatch.setattr(LogClient, "register_consumer", noted)
    step_of(monkeypatch, step)
    with pipeline_of(spark, tmp_path, database) as pipeline:
        house = pipeline.lakehouse(copy_chunk_bytes=CHUNK)
        wait_for(lambda: (house.run_once(force=True), NAME in pipeline.head().copies)[1], 60, "it")
        # What comes now is behind the copy's offset, and in the lake.
        for _ in range(2):
            database.execute(*changes(60 + _))
            pipeline.flush(house)
        copy, cut = pipeline.head().copies[NAME], pipeline.head().streams[STREAM]
        assert copy.offset < cut.offset
        consumer = next(name for name in leases if "-copy-" in name)
        (first,) = (leases.pop(name) for name in [consumer])
        newer = pipeline.lakehouse(copy_chunk_bytes=CHUNK)
        try:
            newer.run_once()
            assert first <= leases[consumer] < pipeline.head().epoch
        finally:
            over.set()
        house.close()
        assert_equal(database.dsn, shown(pipeline, newer))


@pytest.mark.long
def test_21_a_partition_that_comes_and_goes_while_chunks_are_read(
    spark, tmp_path, database, monkeypatch
):
    """Its rows are in the last chunk, nobody has seen it in the catalog, and no message tells that it goes."""
    database.execute(
        "CREATE TABLE events (id bigint, day int, body text, PRIMARY KEY (id, day)) PARTITION BY RANGE (day)",
        "CREATE TABLE events_1 PARTITION OF events FOR VALUES FROM (1) TO (2)",
        f"INSERT INTO events SELECT g, 1, repeat(md5(g::text), 6) FROM generate_series(1, {ROWS}) g",
        "CREATE TABLE small (id int PRIMARY KEY)",
    )
    over = threading.Event()

    def step(before, chunk, read):
        made = read()
        if not before.chunks and not over.is_set():
            database.execute(
                "CREATE TABLE events_2 PARTITION OF events FOR VALUES FROM (2) TO (3)",
                f"INSERT INTO events SELECT g, 2, 'x' FROM generate_series({ROWS + 1}, {ROWS + 9}) g",
            )
        if chunk is not None and chunk.end is None and not over.is_set():
            assert made.rows == ROWS + 9
            database.execute("DROP TABLE events_2")
            over.set()
        return made

    monkeypatch.setattr(bootstrap, "SNAPSHOT_SECONDS", 0.0)
    step_of(monkeypatch, step)
    with Pipeline(spark, tmp_path, database, tables=("public.events", "public.small")) as pipeline:
        house = pipeline.lakehouse(copy_chunk_bytes=CHUNK)
        wait_for(
            lambda: (house.run_once(force=True), house._writer.tables._copies.running)[1],
            60,
            "copies",
        )
        assert over.wait(300)
        assert_equal(database.dsn, shown(pipeline, house))


@pytest.mark.long
def test_21_a_key_that_moved_under_another_replica_identity(
    spark, tmp_path, database, between, capsys
):
    """The server sends no old key then, and all is as it was before the next chunk is read."""
    seen, more = between
    with pipeline_of(spark, tmp_path, database) as pipeline:
        database.execute(
            "ALTER TABLE events ADD other bigserial",
            "CREATE UNIQUE INDEX events_other ON events (other)",
        )
        more[2] = (
            "ALTER TABLE events REPLICA IDENTITY USING INDEX events_other",
            "UPDATE events SET id = 500000 WHERE id = 5",
            "ALTER TABLE events REPLICA IDENTITY DEFAULT",
        )
        house = pipeline.lakehouse(copy_chunk_bytes=CHUNK)
        assert_equal(database.dsn, shown(pipeline, house))
        assert seen.count(()) >= 2
        assert "had another key" in "".join(capsys.readouterr())


@pytest.mark.long
def test_21_a_copy_that_is_damaged_between_two_chunks_begins_again(
    spark, tmp_path, database, between, monkeypatch, capsys
):
    damaged: list[object] = []
    with pipeline_of(spark, tmp_path, database) as pipeline:

        def step(before, chunk, read):
            if len(before.chunks) == 2 and not damaged:
                for file in (pipeline.lake / before.path / "metadata").glob("*.avro"):
                    file.write_bytes(file.read_bytes()[:-7] + b"damaged")
                    damaged.append(file)
            return read()

        step_of(monkeypatch, step)
        house = pipeline.lakehouse(copy_chunk_bytes=CHUNK)
        assert_equal(database.dsn, shown(pipeline, house))
        assert damaged
        assert "copy begins again" in "".join(capsys.readouterr())


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
            for fail_point in ("chunk-copied", "copy-kept", "chunk-copied", "copy-kept"):
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
