"""A lake whose tables are in an Iceberg REST catalog, and their files in a bucket."""

import uuid

import pytest

from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.verify import verify
from spark_consumers.spark.lake_catalog import LakeCatalog, of_lake_at
from spark_consumers.spark.session import session
from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import TABLES, Pipeline
from tests.support.rest_catalog import RestServer
from tests.support.s3 import BUCKET, options_at, s3_keys, s3_port

__all__ = ["s3_keys", "s3_port"]

pytestmark = pytest.mark.usefixtures("s3_keys")

NAMESPACE = ("lakes", "bucket")
#: What the catalog gives with each table: a client that the JVM may not have, and keys that are not the lake's.
GIVEN = {
    "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
    "s3.access-key-id": "of-the-catalog",
    "s3.secret-access-key": "of-nobody",
}


class RestPipeline(Pipeline):
    """A pipeline into a lake in a bucket, whose tables are in the catalog of this server."""

    server: RestServer

    def lakehouse(self, sources=None, **options):
        rest = LakeCatalog(self.server.uri, namespace=NAMESPACE, allow_http=True)
        return super().lakehouse(sources, **{"rest": rest, **options})


@pytest.fixture
def pipeline(spark, tmp_path, database, s3_port):
    database.execute(*TABLES)
    lake = f"s3://{BUCKET}/{uuid.uuid4().hex}/lake"
    made = RestPipeline(spark, tmp_path, database, lake=lake, store=options_at(s3_port))
    with RestServer().running() as server:
        server.keys, made.server = dict(GIVEN), server
        with made as running:
            running.wait_for_tables("docs", "pairs", "bag")
            yield running


def changed(database):
    database.execute(
        "UPDATE docs SET title = 'other' WHERE id = 3",
        "DELETE FROM docs WHERE id = 5",
        "UPDATE pairs SET a = 7 WHERE a = 1",
        "DELETE FROM bag WHERE a IS NULL",
    )


def test_a_lake_in_a_catalog_and_a_bucket_is_the_sum_of_both(pipeline, database, spark, s3_port):
    store = options_at(s3_port)
    assert_equal(database.dsn, pipeline.flush())
    changed(database)
    assert_equal(database.dsn, pipeline.flush())
    pipeline.house.run_once()
    # By SQL and the tables' names, through the catalog, in a session that knows the lake's root alone.
    own = f"rest_{uuid.uuid4().hex[:8]}"
    session(lake=pipeline.lake, catalog=own, endpoint=store.endpoint, region=store.region)
    found = spark.sql(f"SELECT id, title FROM {own}.lakes.bucket.{STREAM}.public.docs").collect()
    with database.connect() as connection:
        wanted = connection.execute("SELECT id, title FROM docs").fetchall()
    assert sorted(map(tuple, found)) == sorted(wanted)
    # Another driver goes on, and what it needs no more goes.
    database.execute("DELETE FROM docs WHERE id = 1", "TRUNCATE pairs")
    newer = pipeline.lakehouse(retention_seconds=0.0)
    assert_equal(database.dsn, pipeline.flush(newer))
    chain = open_chain(pipeline.lake, store)
    assert verify(chain, lambda *_: None).errors == []
    assert_no_orphans(spark, pipeline.lake, store)
    assert of_lake_at(pipeline.lake, store.endpoint, store.region) is not None
