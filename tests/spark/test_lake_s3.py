"""A lake in a bucket, from the copy to its readers, over a real server of S3."""

import uuid

import pytest

from spark_consumers.lake.store.lake_store import StoreOptions
from tests.support.lake_check import assert_equal
from tests.support.lake_pipeline import TABLES, Pipeline
from tests.support.s3 import BUCKET, s3_keys, s3_port

__all__ = ["s3_keys", "s3_port"]

pytestmark = pytest.mark.usefixtures("s3_keys")


@pytest.fixture
def in_bucket(spark, tmp_path, database, s3_port):
    database.execute(*TABLES)
    lake = f"s3://{BUCKET}/{uuid.uuid4().hex}/lake"
    store = StoreOptions(f"http://127.0.0.1:{s3_port}", "us-east-1", allow_http=True)
    with Pipeline(spark, tmp_path, database, lake=lake, store=store) as running:
        running.wait_for_tables("docs", "pairs", "bag")
        yield running


def test_a_lake_in_a_bucket_follows_its_source(in_bucket, database):
    assert_equal(database.dsn, in_bucket.flush())
    database.execute(
        "UPDATE docs SET title = 'new' WHERE id < 4",
        "DELETE FROM docs WHERE id = 5",
        "UPDATE pairs SET a = 7 WHERE a = 1",
        "DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag LIMIT 1)",
        "UPDATE bag SET t = 'two' WHERE a = 1",
    )
    assert_equal(database.dsn, in_bucket.flush())
    database.execute(
        "TRUNCATE pairs", "INSERT INTO pairs VALUES (3, 'z', NULL, NULL)", "UPDATE docs SET f = 1"
    )
    assert_equal(database.dsn, in_bucket.flush())
