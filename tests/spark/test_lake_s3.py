"""A lake in a bucket, from the copy to its readers, over a real server of S3: with a driver that is killed, and a store that fails."""

import json
import random
import signal
import threading
import time
import uuid
from contextlib import closing, contextmanager

import pyarrow.parquet as pq
import pytest
from pyiceberg.table import StaticTable

from spark_consumers import Lakehouse, Source, read
from spark_consumers.lake.flush import flush
from spark_consumers.lake.format.checked import manifests_of
from spark_consumers.lake.format.data_files import read_data
from spark_consumers.lake.format.iceberg_files import newest_metadata
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.store import object_store
from spark_consumers.lake.store.lake_store import Created
from spark_consumers.lake.store.object_store import ObjectStore
from spark_consumers.lake.store.place import place
from spark_consumers.lake.verify import verify
from spark_consumers.spark.failures import SPARK_ERRORS
from tests.support import bank_load
from tests.support.capture_stack import STREAM
from tests.support.engines import assert_read_by_engines, connected
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import TABLES, Pipeline
from tests.support.s3 import BUCKET, KEYS, FaultProxy, options_at
from tests.support.stack import Stack
from tests.support.view_check import BY_TITLE, FLAT, JOINED, assert_followed
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause, CorruptError, UnavailableError

DOCS = f"{STREAM}.public.docs"

pytestmark = pytest.mark.usefixtures("s3_keys")


def new_lake():
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/lake"


@pytest.fixture
def in_bucket(spark, tmp_path, database, s3_port):
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database, lake=new_lake(), store=options_at(s3_port)) as running:
        running.wait_for_tables("docs", "pairs", "bag")
        yield running


def assert_read_by_a_session_of_folders(spark, lake, store, expected):
    """A session that has read a table in a folder before, and has no bucket's settings, reads the lake."""
    other = spark.newSession()
    # Or Hadoop would give it the file system of the tests' own session.
    other.conf.set("fs.s3.impl.disable.cache", "true")
    with pytest.raises(SPARK_ERRORS):
        other.read.format("iceberg").load("/no/table/is/here")
    assert sorted(read(other, lake, store=store)["public.docs"].collect()) == sorted(expected)


def test_27_a_lake_in_a_bucket_follows_its_source_and_so_do_its_views(
    in_bucket, database, spark, s3_port, monkeypatch
):
    pipeline, store = in_bucket, options_at(s3_port)
    assert_equal(database.dsn, pipeline.flush())
    database.execute(
        "UPDATE docs SET title = 'new' WHERE id < 4",
        "DELETE FROM docs WHERE id = 5",
        "UPDATE pairs SET a = 7 WHERE a = 1",
        "DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag LIMIT 1)",
        "UPDATE bag SET t = 'two' WHERE a = 1",
    )
    first = pipeline.flush()
    assert_equal(database.dsn, first)
    rows = first["public.docs"].collect()
    assert_read_by_a_session_of_folders(spark, pipeline.lake, store, rows)
    database.execute(
        "TRUNCATE pairs",
        "INSERT INTO pairs VALUES (3, 'z', NULL, NULL)",
        "UPDATE docs SET f = 1",
        "ALTER TABLE docs ADD extra int",
        "UPDATE docs SET extra = id WHERE id > 6",
    )
    last = pipeline.flush()
    assert_equal(database.dsn, last)
    # Another driver takes the lake over, and goes on.
    database.execute("DELETE FROM docs WHERE id = 1")
    views = (FLAT, BY_TITLE, JOINED)
    pipeline.house = pipeline.lakehouse(retention_seconds=0.0, views=views)
    assert_equal(database.dsn, pipeline.flush())
    assert_followed(pipeline, database, monkeypatch, views)
    chain = open_chain(pipeline.lake, store)
    found = verify(chain, lambda *_: None)
    assert (found.errors, found.files > 10) == ([], True)
    assert len(first["public.docs"].collect()) == 8
    del first, last
    assert_no_orphans(spark, pipeline.lake, store)


@contextmanager
def driven(tmp_path, database, port):
    """A lake in a bucket that a driver of its own process writes, under load; the driver reaches the bucket by `port`."""
    database.execute(*bank_load.TABLES)
    lines = f'endpoint = "http://127.0.0.1:{port}"\nregion = "us-east-1"\nallow_http = true\n'
    with Stack(
        tmp_path, {"shop": database.dsn}, epoch_interval=0.5, lake=lines, uri=new_lake()
    ) as stack:
        stack.start("log-server", "bridge", "lake")
        yield stack


def _all_shown(stack, store):
    head = open_chain(stack.lake, store).head()
    return head is not None and len(head.readable) == 3


def _links(stack, store):
    head = open_chain(stack.lake, store).head()
    assert head is not None
    return head.link


def _source(database):
    return Source("shop", database.dsn, "tuskline_shop")


def assert_whole_and_clean(spark, stack, store, database):
    """All that was committed is there, once; each epoch is whole; and nothing is in the bucket that nobody needs."""
    flush(stack.lake, stack.log_address, [_source(database)], timeout=240, store=store)
    assert stack.stop("lake", 120) == 0
    assert_equal(database.dsn, read(spark, stack.lake, store=store))
    links = open_chain(stack.lake, store).links()
    for epoch in {m.epoch for m in links if len(m.readable) == 3}:
        bank_load.check(read(spark, stack.lake, epoch=epoch, store=store))
    assert_no_orphans(spark, stack.lake, store)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "places",
    [
        ("before-manifest",),
        ("staged", "table-written", "before-manifest", "after-manifest"),
    ],
    ids=["once", "anywhere"],
)
def test_a_killed_driver_leaves_whole_epochs_in_the_bucket(
    tmp_path, database, spark, s3_port, seed, places
):
    store = options_at(s3_port)
    with driven(tmp_path, database, s3_port) as stack:
        wait_for(lambda: _all_shown(stack, store), 240, "the first epoch")
        with bank_load.load(database.dsn, seed):
            stack.kill("lake")
            for point in places:
                before = _links(stack, store)
                stack.start("lake", env={"TUSKLINE_FAIL_POINT": point})
                assert stack.wait("lake", 300) == -9
                # A link for the takeover, and the epoch's own if the manifest was reached.
                assert _links(stack, store) == before + 1 + (point == "after-manifest")
                bank_load.check(read(spark, stack.lake, store=store))
            stack.start("lake")
            after = _links(stack, store) + 3
            wait_for(lambda: _links(stack, store) >= after, 300, "epochs go on")
        assert_whole_and_clean(spark, stack, store, database)


FAULTS = ("500", "503", "drop", "hang", "lost", "late")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_store_that_loses_answers_gets_whole_epochs_once(
    tmp_path, database, spark, s3_port, seed
):
    store, proxy = options_at(s3_port), FaultProxy(s3_port, hang=1.0)
    draw = random.Random(seed)
    # One in ten of all that is written.
    proxy.faults = [draw.choice(FAULTS) if draw.random() < 0.1 else "" for _ in range(10_000)]
    with proxy.running(), driven(tmp_path, database, proxy.port) as stack:
        wait_for(lambda: _all_shown(stack, store), 300, "the first epoch")
        with bank_load.load(database.dsn, seed):
            after = _links(stack, store) + 8
            wait_for(lambda: _links(stack, store) >= after, 300, "epochs go on")
            bank_load.check(read(spark, stack.lake, store=store))
            stack.kill("lake")
            # What was given up long ago arrives now.
            proxy.faults.clear()
            assert proxy.arrive()
            stack.start("lake")
            after = _links(stack, store) + 3
            wait_for(lambda: _links(stack, store) >= after, 300, "epochs go on")
        assert proxy.requests["PUT"] > 100
        assert_whole_and_clean(spark, stack, store, database)


@pytest.mark.timeout(600)
def test_a_suspended_driver_changes_nothing_in_the_bucket_later(
    tmp_path, database, spark, s3_port, seed
):
    store = options_at(s3_port)
    with driven(tmp_path, database, s3_port) as stack:
        wait_for(lambda: _all_shown(stack, store), 240, "the first epoch")
        with bank_load.load(database.dsn, seed):
            after = _links(stack, store) + 1
            wait_for(lambda: _links(stack, store) >= after, 120, "an epoch of the load")
            stack.signal("lake", signal.SIGSTOP)
        newer = Lakehouse(spark, stack.lake, stack.log_address, [_source(database)], store=store)
        stop = threading.Event()
        going_on = threading.Thread(target=newer.run, args=(stop,))
        try:
            wait_for(lambda: newer.run_once(force=True), 120, "the newer driver's epoch")
            shown = read(spark, stack.lake, store=store)
            bank_load.check(shown)
            there = newest_files(stack.lake, store)
            stack.signal("lake", signal.SIGCONT)
            # It ends by name.
            assert stack.wait("lake", 120) == Cause.FENCED
            assert read(spark, stack.lake, store=store).manifest == shown.manifest
            assert newest_files(stack.lake, store) == there
            going_on.start()
            flush(stack.lake, stack.log_address, [_source(database)], timeout=120, store=store)
            assert_equal(database.dsn, read(spark, stack.lake, store=store))
        finally:
            stop.set()
            if going_on.ident is not None:
                going_on.join()
            newer.close()


def newest_files(lake, store):
    """The newest metadata file of each table."""
    chain = open_chain(lake, store)
    head = chain.head()
    assert head is not None
    tables = head.readable
    return {name: str(newest_metadata(chain.root / t.path)) for name, t in tables.items()}


@pytest.mark.long
def test_a_flipped_bit_in_an_object_of_a_table_is_an_error(in_bucket, database, seed):
    """The server of the tests keeps no checksums of what it has."""
    database.execute(
        "INSERT INTO docs SELECT g, md5(g::text), repeat(md5(g::text), 9), g, 0 FROM generate_series(10, 999) g",
        "DELETE FROM docs WHERE id IN (4, 500)",
    )
    shown, draw = in_bucket.flush(), random.Random(seed)
    chain = open_chain(in_bucket.lake, in_bucket.store)
    folder = chain.root / shown.manifest.tables[DOCS].path
    largest = max((folder / "data").glob("*.parquet"), key=lambda file: file.stat().st_size)
    column = pq.read_metadata(largest.open()).row_group(0).column(2)
    # Its values are in one page, whose header, with the least and the greatest value, is shorter than this.
    begin = column.data_page_offset
    page = range(begin + 1000, begin + column.total_compressed_size)
    for _ in flipped(largest, draw.sample(page, 2), draw):
        with pytest.raises(CorruptError):
            read_data(largest)
        found = verify(chain, lambda *_: None).errors
        assert [error.where for error in found] == [str(largest)]
        rows = read(in_bucket.spark, in_bucket.lake, store=in_bucket.store)["docs"]
        with pytest.raises(SPARK_ERRORS, match="CRC checksum verification failed"):
            rows.collect()
    newest = newest_metadata(folder)
    assert newest is not None
    lists = json.loads(newest.read_bytes())["snapshots"][-1]["manifest-list"]
    for file in (newest, place(lists), *manifests_of(place(lists))):
        size = len(file.read_bytes())
        for _ in flipped(file, draw.sample(range(size), 4), draw):
            with pytest.raises(CorruptError, match="metadata/"):
                read(in_bucket.spark, in_bucket.lake, store=in_bucket.store)["docs"].count()
    assert_equal(database.dsn, read(in_bucket.spark, in_bucket.lake, store=in_bucket.store))


@pytest.mark.long
def test_a_store_that_stops_for_a_while_does_not_end_the_driver(in_bucket, database, monkeypatch):
    asked = []

    def unanswered():
        asked.append(time.monotonic())
        raise UnavailableError("the object store does not answer")

    stop = threading.Event()
    running = threading.Thread(target=in_bucket.house.run, args=(stop,))
    try:
        with monkeypatch.context() as outage:
            outage.setattr(object_store, "_check_process", unanswered)
            running.start()
            # A look and what follows its failure ask a few times.
            wait_for(lambda: len(asked) > 10, 60, "the driver asks again")
        assert running.is_alive()
    finally:
        stop.set()
        running.join()
    database.execute("UPDATE docs SET n = n + 1")
    assert_equal(database.dsn, in_bucket.flush(in_bucket.lakehouse()))


def flipped(file, places, draw):
    """Flips a bit at each of these places, one after the other; at the end the object is as it was."""
    good = file.read_bytes()
    for at in places:
        file.replace_by(good[:at] + bytes([good[at] ^ 1 << draw.randrange(8)]) + good[at + 1 :])
        try:
            yield
        finally:
            file.replace_by(good)


@pytest.mark.long
def test_a_commit_that_arrives_late_has_what_it_names(in_bucket, database, monkeypatch):
    """The writer has given it up meanwhile, and its housekeeping has swept the table."""
    create, late = ObjectStore.create, []

    def lost(store, name, content):
        if not name.endswith(".metadata.json"):
            return create(store, name, content)
        late.append((store, name, content))
        raise UnavailableError("it is not known whether the record was created", where=name)

    in_bucket.flush()
    database.execute("UPDATE docs SET n = n + 1")
    in_bucket.barrier()
    versions = [-2, -1]

    def is_quiet():
        versions.append(in_bucket.house._log.status().version)
        time.sleep(1.0)
        return versions[-1] == versions[-3]

    wait_for(is_quiet, 60, "nothing new in the log")
    with monkeypatch.context() as failing:
        failing.setattr(ObjectStore, "create", lost)
        with pytest.raises(UnavailableError):
            in_bucket.house.run_once(force=True)
        assert late
        kept = in_bucket.house._writer.kept
        kept._unswept = [table.path for table in in_bucket.head().versions]
        while kept._unswept or kept._listed is not None:
            kept.expire(in_bucket.head(), 3600.0)
    for store, name, content in late:
        assert create(store, name, content) is Created.WON
    # The same epoch again: it takes the commit for its own, which it is.
    in_bucket.house.run_once(force=True)
    assert_equal(database.dsn, read(in_bucket.spark, in_bucket.lake, store=in_bucket.store))
    assert verify(open_chain(in_bucket.lake, in_bucket.store), lambda *_: None).errors == []


def pyiceberg_in(port):
    properties = {
        "s3.endpoint": f"http://127.0.0.1:{port}",
        "s3.region": "us-east-1",
        "s3.access-key-id": KEYS["AWS_ACCESS_KEY_ID"],
        "s3.secret-access-key": KEYS["AWS_SECRET_ACCESS_KEY"],
    }
    return lambda file: StaticTable.from_metadata(file, properties).scan().to_arrow()


def duckdb_in(port):
    def rows(file):
        with closing(connected()) as connection:
            connection.execute(
                f"CREATE SECRET (TYPE s3, PROVIDER config, KEY_ID '{KEYS['AWS_ACCESS_KEY_ID']}',"
                f" SECRET '{KEYS['AWS_SECRET_ACCESS_KEY']}', ENDPOINT '127.0.0.1:{port}',"
                " REGION 'us-east-1', URL_STYLE 'path', USE_SSL false)"
            )
            query = "SELECT * FROM iceberg_scan(?)"
            return connection.execute(query, [file]).to_arrow_table()

    return rows


@pytest.mark.parametrize("engine", [pyiceberg_in, duckdb_in], ids=["PyIceberg", "DuckDB"])
def test_other_engines_read_the_tables_of_a_bucket(in_bucket, database, s3_port, engine):
    database.execute(
        "UPDATE docs SET title = title || '!' WHERE id < 5",
        "DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE t = 'three')",
        "UPDATE pairs SET b = 'xx', a = 5 WHERE a = 1",
    )
    shown = in_bucket.flush()
    files = newest_files(in_bucket.lake, in_bucket.store)
    assert_read_by_engines(database.dsn, files, shown, {engine.__name__: engine(s3_port)})
