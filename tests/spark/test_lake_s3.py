"""A lake in a bucket, from the copy to its readers, over a real server of S3: with a driver that is killed, and a store that fails."""

import random
import signal
import threading
import uuid
from contextlib import contextmanager

import pytest
from pyiceberg.table import StaticTable

from spark_consumers import Source, read
from spark_consumers.lake.flush import flush
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.store.place import place
from spark_consumers.lake.verify import verify
from tests.support import bank_load
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import TABLES, Pipeline
from tests.support.s3 import BUCKET, KEYS, FaultProxy, options_at, s3_keys, s3_port
from tests.support.stack import Stack
from tests.support.waiting import wait_for

__all__ = ["s3_keys", "s3_port"]

pytestmark = pytest.mark.usefixtures("s3_keys")


def new_lake():
    return f"s3://{BUCKET}/{uuid.uuid4().hex}/lake"


@pytest.fixture
def in_bucket(spark, tmp_path, database, s3_port):
    database.execute(*TABLES)
    with Pipeline(spark, tmp_path, database, lake=new_lake(), store=options_at(s3_port)) as running:
        running.wait_for_tables("docs", "pairs", "bag")
        yield running


def test_a_lake_in_a_bucket_follows_its_source(in_bucket, database, spark, s3_port):
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
    newer = pipeline.lakehouse(retention_seconds=0.0)
    assert_equal(database.dsn, pipeline.flush(newer))
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
