"""A table is copied in chunks again and again, while whatever may happen to it and to its copies does, at random."""

import random
import threading
from contextlib import suppress

import psycopg
import pytest

from spark_consumers.lake.copy import bootstrap
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.writer import requests, table_work
from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_equal
from tests.support.lake_pipeline import Pipeline, maintaining
from tests.support.waiting import wait_for
from walsender_bridge.errors import TusklineError, UnavailableError

NAME = f"{STREAM}.public.events"
ROWS = 6_000
LONG = "repeat(md5(random()::text), 200)"
TABLES = (
    "CREATE TABLE events (id bigint PRIMARY KEY, n int NOT NULL DEFAULT 0, body text, long text, other bigserial)",
    "ALTER TABLE events ALTER long SET STORAGE EXTERNAL",
    "CREATE UNIQUE INDEX events_other ON events (other)",
    f"INSERT INTO events SELECT g, 0, repeat(md5(g::text), 8), CASE WHEN g % 50 = 0 THEN {LONG} END FROM generate_series(1, {ROWS}) g",
    "CREATE TABLE small (id int PRIMARY KEY)",
)
EXPORTER = "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name LIKE 'tuskline_snapshot%'"
KEY = "(SELECT id FROM events OFFSET floor(random() * (SELECT count(*) FROM events)) LIMIT 1)"
#: What happens to rows: often.
ROW_CHANGES = (
    f"UPDATE events SET n = n + 1 WHERE id >= {KEY} AND id % 7 = 0",
    f"UPDATE events SET long = {LONG} WHERE id % 97 = floor(random() * 97)",
    "DELETE FROM events WHERE id % 401 = floor(random() * 401)",
    "INSERT INTO events (id, body) SELECT (random() * 20000)::bigint - 5000, 'new' FROM generate_series(1, 20) ON CONFLICT DO NOTHING",
    f"UPDATE events SET id = (random() * 1e9)::bigint + 100000, long = {LONG} WHERE id = {KEY}",
    f"UPDATE events SET id = -(random() * 1e9)::bigint - 100000, long = {LONG} WHERE id = {KEY}",
    f"UPDATE events SET id = id + 1000000 WHERE id = {KEY} AND long IS NULL",
    "INSERT INTO events (id) VALUES (9223372036854775807), (-9223372036854775808) ON CONFLICT (id) DO UPDATE SET n = events.n + 1",
    f"""BEGIN; SAVEPOINT a; UPDATE events SET n = -1; ROLLBACK TO a; SAVEPOINT b; UPDATE events SET n = n + 5 WHERE id = {KEY};
        RELEASE b; DELETE FROM events WHERE id = {KEY}; COMMIT""",
    """BEGIN; INSERT INTO events (id, body) VALUES (-77, 'twice'); DELETE FROM events WHERE id = -77;
        INSERT INTO events (id, body) VALUES (-77, 'again'); UPDATE events SET id = -(random() * 1e6)::bigint - 2000 WHERE id = -77; COMMIT""",
)
#: What happens to the table: seldom, since it is copied again after some of these.
TABLE_CHANGES = (
    "VACUUM FULL events",
    "CLUSTER events USING events_pkey",
    "TRUNCATE events; INSERT INTO events (id, body) SELECT g, repeat('y', 250) FROM generate_series(1, 6000) g",
    "ALTER TABLE events ADD extra int; UPDATE events SET extra = 5 WHERE id % 3 = 0; ALTER TABLE events DROP extra",
    f"""ALTER TABLE events REPLICA IDENTITY USING INDEX events_other; UPDATE events SET id = id + 2000000 WHERE id = {KEY};
        ALTER TABLE events REPLICA IDENTITY DEFAULT""",
    f"""ALTER TABLE events REPLICA IDENTITY FULL; UPDATE events SET id = id + 3000000 WHERE id = {KEY};
        ALTER TABLE events REPLICA IDENTITY DEFAULT""",
    "ALTER TABLE events ALTER n TYPE int USING n + 1",
    EXPORTER,
    EXPORTER,
)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_21_copies_in_chunks_are_the_table_whatever_happens(
    spark, tmp_path, database, monkeypatch, seed
):
    choose = random.Random(seed)
    print(f"seed {seed}")
    monkeypatch.setattr(bootstrap, "SNAPSHOT_SECONDS", 0.0)
    monkeypatch.setattr(table_work, "_AFTER_FAILURE", 0.2)
    lock = threading.Lock()
    calm = threading.Event()
    done: list[str] = []
    chunks: list[int] = []

    def happens():
        if calm.is_set():
            return
        with lock, database.connect() as connection:
            some = [choose.choice(ROW_CHANGES) for _ in range(choose.randint(1, 6))]
            if choose.random() < 0.04:
                some.append(choose.choice(TABLE_CHANGES))
            for each in some:
                done.append(each)
                for statement in each.split(";"):
                    with suppress(psycopg.errors.UniqueViolation, psycopg.errors.InFailedSqlTransaction):  # fmt: skip
                        connection.execute(statement.strip().encode())

    def fails(chance):
        with lock:
            if not calm.is_set() and choose.random() < chance:
                raise UnavailableError("this attempt fails")

    copier = bootstrap.TableCopier
    with_next, read, indexed = copier._with_next, copier._read, copier._indexed

    def unsteady_next(self, table, before, *given):
        if table.published.name != "events":
            return with_next(self, table, before, *given)
        chunks.append(len(before.chunks))
        happens()
        made = with_next(self, table, before, *given)
        happens()
        if before.chunks:
            # Its commit is made.
            fails(0.4)
        return made

    def unsteady_read(self, *given):
        fails(0.05)
        return read(self, *given)

    def unsteady_index(self, *given):
        made = indexed(self, *given)
        fails(0.3)
        return made

    monkeypatch.setattr(copier, "_with_next", unsteady_next)
    monkeypatch.setattr(copier, "_read", unsteady_read)
    monkeypatch.setattr(copier, "_indexed", unsteady_index)
    database.execute(*TABLES)
    with (
        Pipeline(spark, tmp_path, database, tables=("public.events", "public.small")) as pipeline,
        maintaining(pipeline),
    ):
        house = pipeline.lakehouse(copy_chunk_bytes=300_000)

        def is_current():
            with suppress(TusklineError):
                house.run_once(force=True)
            head = pipeline.head()
            table = head.tables.get(NAME)
            is_live = table is not None and table.state == "live" and not table.resync
            return is_live and NAME not in head.copies

        for _ in range(3):
            calm.clear()
            until = len(chunks) + choose.randint(3, 9)

            def enough(until=until):
                happens()
                return is_current() or len(chunks) >= until

            wait_for(enough, 120, "some chunks")
            if choose.random() < 0.5:
                # The one before goes on with its copies, and is fenced.
                chunk = choose.choice([200_000, 300_000, 10**9])
                house = pipeline.lakehouse(copy_chunk_bytes=chunk)
            calm.set()
            wait_for(is_current, 300, "the table")
            assert_equal(database.dsn, pipeline.flush(house))
            requests.ask(open_chain(pipeline.lake), requests.RESYNC, [NAME])
        print(len(done), "changes; chunks behind", chunks)
