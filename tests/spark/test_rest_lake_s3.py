"""A lake whose tables are in an Iceberg REST catalog, and their files in a bucket."""

import uuid
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from spark_consumers import read
from spark_consumers.lake.maintenance.maintainer import Limits, Maintainer
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.verify import verify
from spark_consumers.spark.lake_catalog import LakeCatalog
from spark_consumers.spark.session import session
from tests.support.capture_stack import STREAM
from tests.support.lake_check import assert_equal, assert_no_orphans
from tests.support.lake_pipeline import TABLES, Pipeline
from tests.support.rest_catalog import RestServer
from tests.support.s3 import BUCKET, options_at
from tests.support.waiting import wait_for
from walsender_bridge.postgres.table_layout import LayoutRule, TableLayout
from walsender_bridge.postgres.table_patterns import Pattern

pytestmark = pytest.mark.usefixtures("s3_keys")

PAIRS = f"{STREAM}.public.pairs"
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


def rule(name, partition=(), sort=()):
    return LayoutRule(Pattern.parse(name), TableLayout.parse(partition, sort, {}))


#: A table in partitions, a sorted one with position deletes, and one as tables are without any choice.
CHOSEN = {
    "layouts": [rule("public.docs", ["bucket(2, id)"]), rule("public.pairs", (), ["a desc"])],
    "deletes": {PAIRS: "position-deletes"},
}


def churn(database, pipeline, rounds):
    """Epochs that insert, update and delete in all three tables."""
    for number in rounds:
        database.execute(
            f"INSERT INTO docs SELECT g, 'new', 'b', 1 FROM generate_series({100 + 10 * number}, {107 + 10 * number}) g",
            f"UPDATE docs SET n = n + 1 WHERE id = {number + 1}",
            f"DELETE FROM docs WHERE id = {101 + 10 * number}",
            f"INSERT INTO pairs SELECT g, 'p' FROM generate_series({10 * number + 10}, {10 * number + 13}) g",
            f"UPDATE pairs SET tags = '{{3}}' WHERE a = {10 * number + 11}",
            f"INSERT INTO bag SELECT {number}, 0.5, 'bag', NULL FROM generate_series(1, 4)",
            f"DELETE FROM bag WHERE ctid = (SELECT min(ctid) FROM bag WHERE a = {number})",
        )
        pipeline.flush()


def compacted(pipeline):
    """Have a maintainer prepare what is due, and the driver decide on it; what the maintainer tells."""
    made, stop = Maintainer(pipeline.lake, Limits(interval=0.1), store=pipeline.store), Event()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(made.run_once, stop)
        try:
            wait_for(lambda: pipeline.house.run_once() or running.done(), 120, "decisions")
        finally:
            stop.set()
        running.result()
    made.close()
    return made.summary


@pytest.mark.long
def test_a_lake_in_a_catalog_and_a_bucket_is_the_sum_of_both(pipeline, database, spark, s3_port):
    store = options_at(s3_port)
    assert_equal(database.dsn, pipeline.flush())
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(**CHOSEN)
    churn(database, pipeline, range(5))
    assert_equal(database.dsn, read(spark, pipeline.lake, store=store))
    epoch, said = pipeline.head().epoch, compacted(pipeline)
    assert (said.accepted > 0, said.refused, pipeline.head().epoch) == (True, 0, epoch)
    assert said.files_after < said.files_before
    assert_equal(database.dsn, read(spark, pipeline.lake, store=store))
    churn(database, pipeline, range(5, 7))
    assert_equal(database.dsn, read(spark, pipeline.lake, store=store))
    pipeline.house.run_once()
    # By SQL and the tables' names, through the catalog, in a session that knows the lake's root alone.
    own = f"rest_{uuid.uuid4().hex[:8]}"
    session(lake=pipeline.lake, catalog=own, endpoint=store.endpoint, region=store.region)
    found = spark.sql(f"SELECT id, title FROM {own}.lakes.bucket.{STREAM}.public.docs").collect()
    with database.connect() as connection:
        wanted = connection.execute("SELECT id, title FROM docs").fetchall()
    assert sorted(map(tuple, found)) == sorted(wanted)
    # Another driver goes on, and what nobody needs any more goes.
    database.execute("DELETE FROM docs WHERE id = 1", "TRUNCATE bag")
    newer = pipeline.lakehouse(retention_seconds=0.0, **CHOSEN)
    assert_equal(database.dsn, pipeline.flush(newer))
    chain = open_chain(pipeline.lake, store)
    assert verify(chain, lambda *_: None).errors == []
    assert_no_orphans(spark, pipeline.lake, store)
    pipeline.server.assert_no_stray_manifest()
