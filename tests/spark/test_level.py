"""A source's slot is lost: the tables are brought level by a comparison, and only the rows that differ are written."""

import threading
from contextlib import suppress
from typing import Any

import psycopg
import pytest

from spark_consumers import read
from spark_consumers.lake.copy import bootstrap, compared
from spark_consumers.lake.manifest.table_version import LIVE
from spark_consumers.lake.status import read_status, table_rows
from tests.support.capture_stack import SLOT, STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import TABLES, Pipeline
from tests.support.servers import Database, majors
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.postgres.column_masks import ColumnMask
from walsender_bridge.postgres.table_layout import LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern
from walsender_bridge.provisioning.reattach import reattach
from walsender_bridge.runtime import fail_point

#: Bytes of a chunk.
CHUNK = 64 << 10


class Logged:
    """What the copier logs: of tables that were brought level, by name, and why others were copied."""

    def __init__(self) -> None:
        self.level: dict[str, dict[str, Any]] = {}
        self.copied: dict[str, str] = {}
        #: The names, as often as they were brought level.
        self.names: list[str] = []

    def info(self, what: str, **values: Any) -> None:
        if what == "table brought level":
            self.names.append(name := values.pop("table").rpartition(".")[2])
            self.level[name] = values

    def warning(self, what: str, **values: Any) -> None:
        if what == "table is copied instead of being brought level":
            self.copied[values["table"].rpartition(".")[2]] = values["reason"]

    def written(self) -> dict[str, tuple[int, int]]:
        """The rows that were added and removed, by table."""
        return {name: (each["added"], each["removed"]) for name, each in self.level.items()}


@pytest.fixture
def logged(monkeypatch):
    monkeypatch.setattr(compared, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(compared, "BUCKET_BYTES", CHUNK // 4)
    found = Logged()
    monkeypatch.setattr(bootstrap, "log", found)
    return found


def lose_slot(pipeline, *statements):
    """The slot is dropped, and these statements are in no log."""
    pipeline.capture.kill()
    database = pipeline.database

    def dropped():
        with database.connect() as connection:
            try:
                connection.execute("SELECT pg_drop_replication_slot(%s)", [SLOT])
            except psycopg.errors.ObjectInUse:
                return False
            return True

    wait_for(dropped, 30, "the slot is dropped")
    database.execute(*statements)


def begin_again(pipeline):
    """As `tuskline reattach` does; capture streams again."""
    with LogClient(pipeline.log.address) as log:
        reattach(pipeline.capture.settings.source, log)
    pipeline.capture.start()
    wait_for(pipeline.capture.streams, 60, "capture streams")


def live_again(pipeline):
    """Run rounds until all tables follow; the snapshot that has everything."""

    def follow():
        pipeline.house.run_once(force=True)
        return {t.state for t in pipeline.head().tables.values()} == {LIVE}

    wait_for(follow, 120, "all tables follow")
    return pipeline.flush()


def paths(pipeline):
    return {name.rpartition(".")[2]: t.path for name, t in pipeline.head().tables.items()}


def test_few_rows_of_many_are_written_after_a_lost_slot(spark, tmp_path, database, logged):
    database.execute(
        "CREATE TABLE big (id int PRIMARY KEY, t text, f float8)",
        "INSERT INTO big SELECT g, repeat('x', 90), g FROM generate_series(1, 20000) g",
        "CREATE TABLE same (id int PRIMARY KEY)",
        "INSERT INTO same SELECT generate_series(1, 1000)",
    )
    with Pipeline(spark, tmp_path, database, ("public.big", "public.same")) as pipeline:
        pipeline.wait_for_tables("big", "same")
        database.execute("UPDATE big SET f = -f WHERE id % 1000 = 7")
        pipeline.flush()
        before, head = paths(pipeline), pipeline.head()
        # The log has this, and the lake never reads it: its driver was not at work.
        database.execute(
            "UPDATE big SET t = 'in the log' WHERE id = 11", "DELETE FROM big WHERE id = 12"
        )
        pipeline.barrier()
        lose_slot(
            pipeline,
            "UPDATE big SET t = 'lost' WHERE id = 5000",
            "DELETE FROM big WHERE id = 10000",
            "UPDATE big SET id = 30000 WHERE id = 10001",
            "INSERT INTO big VALUES (30001, NULL, 'NaN')",
        )
        begin_again(pipeline)
        snapshot = live_again(pipeline)
        assert_equal(database.dsn, snapshot)
        assert paths(pipeline) == before
        assert not logged.copied
        big, same = logged.level["big"], logged.level["same"]
        assert logged.written() == {"big": (4, 5), "same": (0, 0)}
        assert (big["rows"], same["rows"]) == (20_000 - 2 + 1, 1000)
        assert big["chunks"] > 20
        assert big["different_chunks"] <= 6
        assert big["read"] < 10_000
        name = f"{STREAM}.public.same"
        assert snapshot.manifest.tables[name].snapshot_id == head.tables[name].snapshot_id
        # The epoch before has the rows that it had, and the table follows from where it is level.
        old = read(spark, pipeline.lake, epoch=head.epoch)["public.big"]
        assert old.count() == 20_000
        assert old.filter("id = 30000 OR t = 'in the log'").count() == 0
        database.execute(
            "UPDATE big SET t = 'after' WHERE id IN (11, 5000, 30000)",
            "DELETE FROM big WHERE id = 30001",
        )
        assert_equal(database.dsn, pipeline.flush())
        # So does the next writer.
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse()
        database.execute("DELETE FROM big WHERE id < 100")
        assert_equal(database.dsn, pipeline.flush())
        assert_no_orphans(spark, pipeline.lake)


MORE = (
    "CREATE TABLE uuids (id uuid PRIMARY KEY, t text)",
    "INSERT INTO uuids SELECT rpad(lpad(to_hex(g * 90000), 8, '0'), 32, '0')::uuid, repeat('x', 90) FROM generate_series(1, 3000) g",
    "CREATE TABLE parted (id int, k int, t text, PRIMARY KEY (id, k)) PARTITION BY LIST (k)",
    "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1)",
    "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES IN (2)",
    "INSERT INTO parted SELECT g, 1 + g % 2, repeat('p', 50) FROM generate_series(1, 2000) g",
    "CREATE TABLE bags (id int, t text, f float8)",
    "ALTER TABLE bags REPLICA IDENTITY FULL",
    "INSERT INTO bags SELECT g / 3, repeat('x', 90), 1 FROM generate_series(1, 3000) g",
    "CREATE TABLE emptied (id int PRIMARY KEY)",
    "INSERT INTO emptied SELECT generate_series(1, 50)",
    "CREATE TABLE filled (id int PRIMARY KEY, t text)",
    "CREATE TABLE altered (id int PRIMARY KEY, t text)",
    "INSERT INTO altered VALUES (1, 'a')",
    "CREATE TABLE rekeyed (a int PRIMARY KEY, b int NOT NULL UNIQUE)",
    "INSERT INTO rekeyed VALUES (1, 2)",
    "CREATE TABLE secret (id int PRIMARY KEY, t text)",
    "INSERT INTO secret VALUES (1, 'a'), (2, 'b')",
)
#: What is in no log, and how many rows are added and removed for it, by table; of the others why they are copied.
LOST = (
    "UPDATE docs SET title = 'T1', body = body || 'e', n = n + 0.001, f = '-0' WHERE id = 1",
    "UPDATE docs SET title = title || ' ' WHERE id = 2",
    "DELETE FROM docs WHERE id = 3",
    "INSERT INTO docs VALUES (99, NULL, NULL, NULL, 'NaN')",
    "UPDATE pairs SET b = 'X' WHERE a = 1",
    "UPDATE pairs SET at = '2024-01-01', tags = '{3}' WHERE a = 2",
    "INSERT INTO bag SELECT * FROM bag WHERE f = 'NaN'",
    "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE f::text = '0')",
    "DELETE FROM uuids WHERE ctid IN (SELECT ctid FROM uuids ORDER BY id LIMIT 2)",
    "INSERT INTO uuids VALUES ('ffffffff-ffff-ffff-ffff-ffffffffffff', 'last')",
    "UPDATE parted SET k = 3 - k WHERE id = 7",
    "UPDATE bags SET t = 'y' WHERE ctid = (SELECT min(ctid) FROM bags WHERE id = 500)",
    "INSERT INTO bags SELECT 501, repeat('x', 90), 1 FROM generate_series(1, 2)",
    "TRUNCATE emptied",
    "INSERT INTO filled SELECT g, 'f' || g FROM generate_series(1, 60) g",
    "ALTER TABLE altered ADD COLUMN more int DEFAULT 7",
    "ALTER TABLE rekeyed DROP CONSTRAINT rekeyed_pkey, ADD PRIMARY KEY (b)",
    "UPDATE secret SET t = 'c' WHERE id = 2",
)
WRITTEN = {
    "docs": (3, 3),
    "pairs": (2, 2),
    "bag": (1, 1),
    "uuids": (1, 2),
    "parted": (1, 1),
    "bags": (3, 1),
    "emptied": (0, 50),
    "filled": (60, 0),
}
NAMES = (*WRITTEN, "altered", "rekeyed", "secret")
RULE = LayoutRule(Pattern.parse("public.secret"), TableLayout(), masks=(ColumnMask("t", "drop"),))


def test_each_kind_of_difference_in_each_kind_of_table(spark, tmp_path, database, logged):
    database.execute(*TABLES, *MORE)
    published = [f"public.{name}" for name in NAMES]
    with Pipeline(spark, tmp_path, database, published) as pipeline:
        pipeline.house.close()
        pipeline.house = pipeline.lakehouse(layouts=[RULE])
        pipeline.wait_for_tables(*NAMES)
        before = paths(pipeline)
        lose_slot(pipeline, *LOST)
        begin_again(pipeline)
        snapshot = live_again(pipeline)
        others = [n for n in snapshot.tables if not n.endswith("secret")]
        assert_equal(database.dsn, snapshot, only=others)
        assert logged.written() == WRITTEN
        after = paths(pipeline)
        assert {n for n in NAMES if before[n] != after[n]} == {"altered", "rekeyed", "secret"}
        assert logged.copied == {
            "altered": "its columns have changed",
            "rekeyed": "its key has changed",
        }
        assert snapshot["public.secret"].columns == ["id"]
        database.execute(
            "UPDATE docs SET title = 'after' WHERE id = 2",
            "UPDATE bags SET f = 2 WHERE id = 501",
            "DELETE FROM parted WHERE id = 7",
            "INSERT INTO emptied VALUES (1)",
        )
        assert_equal(database.dsn, pipeline.flush(), only=others)


class DiedError(BaseException):
    """The driver died."""


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("level-compared", marks=pytest.mark.long),
        pytest.param("level-staged", marks=pytest.mark.long),
        "level-written",
        pytest.param("copy-kept", marks=pytest.mark.long),
    ],
)
def test_4_a_driver_that_dies_while_a_table_is_brought_level_leaves_nothing(
    pipeline, database, logged, monkeypatch, place
):
    """Another one begins again, at another snapshot: what changed meanwhile is there, and nothing twice."""
    before = paths(pipeline)
    head = pipeline.head()
    lose_slot(
        pipeline,
        "UPDATE docs SET title = 'lost' WHERE id < 5",
        "DELETE FROM docs WHERE id = 9",
        "INSERT INTO bag VALUES (7, 7, 'seven', NULL)",
    )
    begin_again(pipeline)
    died = threading.Event()

    def hit(name: str) -> None:
        if name == place:
            died.set()
            raise DiedError

    monkeypatch.setattr(fail_point, "hit", hit)

    def is_dead():
        with suppress(DiedError):
            pipeline.house.run_once()
        return died.is_set()

    wait_for(is_dead, 60, place)
    pipeline.house.close()
    monkeypatch.undo()
    monkeypatch.setattr(bootstrap, "log", logged)
    kept = {name.rpartition(".")[2] for name in pipeline.head().copies}
    # Readers have what they had.
    spark = pipeline.spark
    stale = read(spark, pipeline.lake, allow_stale=True)
    assert stale.epoch == head.epoch
    assert stale["public.docs"].filter("title = 'lost'").count() == 0
    database.execute("UPDATE docs SET title = 'later' WHERE id = 4", "INSERT INTO docs VALUES (9)")
    pipeline.house = pipeline.lakehouse(retention_seconds=0.5)
    assert_equal(database.dsn, live_again(pipeline))
    assert paths(pipeline) == before
    assert not logged.copied
    # What a link has is not compared again.
    assert all(logged.names.count(name) == 1 for name in kept)
    assert bool(kept) == (place == "copy-kept")

    def swept():
        database.execute("INSERT INTO pairs SELECT max(a) + 1, 'z' FROM pairs")
        pipeline.flush()
        try:
            assert_no_orphans(spark, pipeline.lake)
        except AssertionError:
            return False
        return True

    wait_for(swept, 60, "what the dead driver has left is removed")


@pytest.mark.timeout(240)
def test_20_what_is_written_while_tables_are_brought_level_is_there(
    spark, tmp_path, database, logged
):
    """Rows and keys change from before the slot is lost until the tables follow again; epochs have whole transactions."""
    database.execute(
        "CREATE TABLE a (id int PRIMARY KEY, n int)",
        "CREATE TABLE b (id int PRIMARY KEY, n int)",
        *(f"INSERT INTO {t} SELECT g, 100 FROM generate_series(1, 3000) g" for t in "ab"),
    )
    stop = threading.Event()
    moved = 0

    def write() -> None:
        nonlocal moved
        with psycopg.connect(database.dsn) as connection:
            while not stop.wait(0.002):
                moved += 1
                one, other = moved % 3000 + 1, (moved * 7) % 3000 + 1
                connection.execute("UPDATE a SET n = n - 1 WHERE id IN (%s, -%s)", [one, one])
                connection.execute("UPDATE b SET n = n + 1 WHERE id IN (%s, -%s)", [one, one])
                connection.execute("UPDATE a SET id = -id WHERE id IN (%s, -%s)", [other, other])
                connection.commit()

    with Pipeline(spark, tmp_path, database, ("public.a", "public.b")) as pipeline:
        pipeline.wait_for_tables("a", "b")
        before = paths(pipeline)
        writer = threading.Thread(target=write)
        writer.start()
        try:
            pipeline.flush()
            lose_slot(pipeline)
            begin_again(pipeline)
            seen: set[int] = set()
            # Until some epochs with both tables have come.
            while len(seen) < 3:
                pipeline.house.run_once(force=True)
                snapshot = read(spark, pipeline.lake)
                if {*snapshot} == {f"{STREAM}.public.a", f"{STREAM}.public.b"}:
                    seen.add(snapshot.epoch)
                    sums = [snapshot[f"public.{t}"].agg({"n": "sum"}).collect()[0][0] for t in "ab"]
                    assert sum(sums) == 600_000, (
                        f"epoch {snapshot.epoch} has a part of a transaction"
                    )
        finally:
            stop.set()
            writer.join()
        assert_equal(database.dsn, pipeline.flush())
        assert paths(pipeline) == before
        assert not logged.copied
        assert {*logged.level} == {"a", "b"}


@pytest.mark.long
def test_a_table_that_is_mostly_others_or_damaged_is_copied(
    spark, tmp_path, database, logged, monkeypatch
):
    monkeypatch.setattr("spark_consumers.lake.comparison.level.FEW", 50)
    database.execute(
        "CREATE TABLE others (id int PRIMARY KEY, t text)",
        "INSERT INTO others SELECT g, 'a' FROM generate_series(1, 500) g",
        "CREATE TABLE broken (id int PRIMARY KEY, t text)",
        "INSERT INTO broken SELECT g, 'a' FROM generate_series(1, 500) g",
    )
    with Pipeline(spark, tmp_path, database, ("public.others", "public.broken")) as pipeline:
        pipeline.wait_for_tables("others", "broken")
        before = paths(pipeline)
        lose_slot(pipeline, "UPDATE others SET t = 'b' WHERE id > 100")
        begin_again(pipeline)
        for file in (pipeline.lake / before["broken"] / "data").glob("*.parquet"):
            file.write_bytes(file.read_bytes()[:-100] + bytes(100))
        snapshot = live_again(pipeline)
        assert_equal(database.dsn, snapshot)
        assert logged.copied["others"] == "too many of its rows differ"
        assert {*logged.copied} == {"others", "broken"}
        assert not {*before.values()} & {*paths(pipeline).values()}


@pytest.mark.long
def test_table_list_shows_how_far_the_comparison_is(pipeline, logged, monkeypatch):
    lose_slot(pipeline, "UPDATE docs SET title = 'lost' WHERE id = 1")
    begin_again(pipeline)
    held, go_on = threading.Event(), threading.Event()

    def hit(name: str) -> None:
        if name == "level-compared":
            held.set()
            assert go_on.wait(60)

    monkeypatch.setattr(fail_point, "hit", hit)
    chain = pipeline.house._chain
    docs = f"{STREAM}.public.docs"

    def shown():
        pipeline.house.run_once()
        status = read_status(chain)
        rows = {row["table"]: row for row in table_rows(pipeline.head(), status, status.at)}
        row = rows[docs]
        return held.is_set() and (row["copy"] or {}).get("changed") and row

    try:
        row = wait_for(shown, 60, "the table in `table list`")
    finally:
        go_on.set()
    assert (row["state"], row["resync"]) == ("held", "leveling")
    assert (row["copy"]["rows"], row["copy"]["changed"]) == (9, 2)
    assert_equal(pipeline.database.dsn, live_again(pipeline))


def account_run(server, *command):
    server._account.run(command)


@pytest.mark.timeout(240)
def test_a_source_that_was_restored_to_a_point_in_time(spark, tmp_path, make_server, logged):
    """The lake is ahead: it has rows that the source does not have any more. The server is on another timeline."""
    server = make_server(fsync="off", archive_mode="on")
    archive = server._account.make_folder(server.folder.resolve() / "archive")
    with (server.data_dir / "postgresql.conf").open("a") as conf:
        conf.write(f"archive_command = 'cp %p {archive}/%f'\n")
    server.start()
    database = Database("postgres", server)
    database.execute(
        "CREATE TABLE a (id int PRIMARY KEY, t text)",
        "INSERT INTO a SELECT g, 'a' FROM generate_series(1, 2000) g",
        "CREATE TABLE b (t text)",
        "ALTER TABLE b REPLICA IDENTITY FULL",
        "INSERT INTO b SELECT 'x' FROM generate_series(1, 10)",
    )
    base = server.copied(tmp_path / "base")
    try:
        with Pipeline(spark, tmp_path, database, ("public.a", "public.b")) as pipeline:
            pipeline.wait_for_tables("a", "b")
            before = paths(pipeline)
            database.execute("UPDATE a SET t = 'kept' WHERE id = 1")
            database.execute("SELECT pg_create_restore_point('then')")
            database.execute(
                "INSERT INTO a SELECT g, 'gone' FROM generate_series(5001, 5020) g",
                "DELETE FROM a WHERE id = 2",
                "UPDATE a SET t = 'gone' WHERE id = 3",
                "INSERT INTO b VALUES ('x'), ('y')",
            )
            ahead = pipeline.flush()
            assert ahead["public.a"].count() == 2019
            pipeline.capture.kill()
            server.stop()
            account_run(server, "rm", "-rf", server.data_dir)
            account_run(server, "cp", "-a", base.data_dir, server.data_dir)
            (server.data_dir / "recovery.signal").touch()
            with (server.data_dir / "postgresql.conf").open("a") as conf:
                conf.write(
                    f"restore_command = 'cp {archive}/%f %p'\nrecovery_target_name = 'then'\n"
                    "recovery_target_action = 'promote'\n"
                )
            account_run(server, "chmod", "700", server.data_dir)
            server.start()

            def promoted():
                with database.connect() as connection:
                    return connection.execute("SELECT NOT pg_is_in_recovery()").fetchone() == (
                        True,
                    )

            wait_for(promoted, 60, "the server is promoted")
            begin_again(pipeline)
            snapshot = live_again(pipeline)
            assert_equal(database.dsn, snapshot)
            assert snapshot["public.a"].count() == 2000
            assert paths(pipeline) == before
            assert logged.written() == {"a": (2, 21), "b": (0, 2)}
            assert {t.timeline for t in snapshot.manifest.tables.values()} == {2}
            # What the server has lost is readable in the epochs before.
            assert read(spark, pipeline.lake, epoch=ahead.epoch)["public.a"].count() == 2019
    finally:
        base.destroy()


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("major", [13, 16])
def test_a_source_that_pg_upgrade_made_another_cluster(spark, tmp_path, make_server, logged, major):
    """As docs/reattach.md says: the slot cannot be upgraded, and is dropped before."""
    if missing := {major, 18} - {*majors()}:
        pytest.skip(f"needs PostgreSQL {missing}")
    old, new = make_server(major, fsync="off"), make_server(18, fsync="off")
    # The default since 18. pg_upgrade wants both clusters alike.
    account_run(new, new.installation.tool("pg_checksums"), "--disable", "-D", new.data_dir)
    for server in (old, new):
        hba = server.data_dir / "pg_hba.conf"
        hba.write_text(hba.read_text().replace("scram-sha-256", "trust"))
    old.start()
    database = Database("postgres", old)
    database.execute(
        "CREATE TYPE mood AS ENUM ('good', 'bad')",
        "CREATE TABLE a (id int PRIMARY KEY, m mood, n numeric, at timestamptz)",
        "INSERT INTO a SELECT g, 'good', g / 7.0, now() FROM generate_series(1, 3000) g",
    )
    with Pipeline(spark, tmp_path, database, ("public.a",)) as pipeline:
        pipeline.wait_for_tables("a")
        before = paths(pipeline)
        lose_slot(pipeline, "UPDATE a SET m = 'bad' WHERE id = 5")
        old.stop()
        upgrade(old, new)
        new.port = old.port
        new.start()
        begin_again(pipeline)
        snapshot = live_again(pipeline)
        assert_equal(database.dsn, snapshot)
        assert paths(pipeline) == before
        assert logged.written() == {"a": (1, 1)}
        database.execute("UPDATE a SET m = 'bad' WHERE id = 6", "DELETE FROM a WHERE id = 7")
        assert_equal(database.dsn, pipeline.flush())


def upgrade(old, new):
    """Run pg_upgrade, both servers being down."""
    work = old._account.make_folder(old.folder.resolve() / "upgrade")
    tool = new.installation.tool("pg_upgrade")
    account_run(
        new,
        "sh",
        "-c",
        f"cd {work} && {tool} -b {old.installation.bin_dir} -B {new.installation.bin_dir} -d {old.data_dir}"
        f" -D {new.data_dir} -U postgres -p {old.port} -P {new.port}",
    )
