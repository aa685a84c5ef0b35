"""A session of Spark Connect reads what a session of its own JVM reads: a lake, and both sources."""

import json
import subprocess
import sys
import uuid

import pytest

from spark_consumers import ExportedSnapshot, read
from spark_consumers.spark import jars
from tests.support.capture_stack import STREAM
from tests.support.connect_job import rows
from tests.support.lake_pipeline import TABLES, Pipeline
from tests.support.s3 import BUCKET, KEYS, options_at
from tests.support.spark_jvm import in_pysparks_home
from tests.support.spark_server import CLIENT, connect_server, environment, needs_connect
from tests.support.view_check import VIEWS, assert_views

pytestmark = [pytest.mark.timeout(900), needs_connect]


def test_a_lake_and_both_sources_are_read_over_spark_connect(tmp_path, pipeline, database):
    pipeline.house.close()
    pipeline.house = pipeline.lakehouse(views=VIEWS)
    pipeline.flush()
    database.execute(
        "UPDATE docs SET title = 'new' WHERE id = 3",
        "DELETE FROM docs WHERE id = 4",
        "UPDATE pairs SET tags = '{7}' WHERE a = 2",
    )
    snap = pipeline.flush()
    assert_views(database, snap, VIEWS)
    # The client damages a table at its end.
    expected = {name: rows(frame) for name, frame in snap.items()}
    database.execute("DELETE FROM pairs WHERE a = 1", "DELETE FROM bag WHERE t IS NULL")
    pipeline.barrier()
    newest = read(pipeline.spark, pipeline.lake, live=True, log=pipeline.log.address)
    now = {name: rows(frame) for name, frame in newest.items()}
    assert (len(now[f"{STREAM}.public.pairs"]), len(now[f"{STREAM}.public.bag"])) == (1, 4)
    assert_views(database, newest, VIEWS, counted=False)
    place = tmp_path / "connect"
    place.mkdir()
    with ExportedSnapshot(database.dsn) as exported, connect_server(place) as server:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.support.connect_job", server, str(pipeline.lake)),
                *(pipeline.log.address, database.dsn, exported.snapshot, str(place)),
            ],
            env=environment(CLIENT),
            cwd=place,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:] + (place / "connect.log").read_text()[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["session"] == "pyspark.sql.connect.session"
    assert found["epoch"] == found["again"] == snap.epoch
    assert found["tables"] == expected
    assert found["live"] == now
    assert found["named"] == expected[f"{STREAM}.public.docs"]
    assert {*expected} > {f"{STREAM}.{view.name}" for view in VIEWS}
    assert found["views"] == {
        "now_" + name.removeprefix(f"{STREAM}.").replace(".", "_"): len(there)
        for name, there in expected.items()
    }
    changes = [
        ("public.bag", "D", None),
        ("public.docs", "D", None),
        ("public.docs", "U", "new"),
        ("public.pairs", "D", None),
        ("public.pairs", "U", "{7}"),
    ]
    assert [
        (relation, op, after and after.get("title", after.get("tags")))
        for relation, op, after in found["changes"]
        if relation != "tuskline.flush"
    ] == changes
    assert found["snapshot"] == now[f"{STREAM}.public.pairs"]
    assert found["streamed"] == [["D", "None", "None"], ["U", "3", "new"]]
    assert found["written"] == "a session of Spark Connect cannot write a lake"
    assert found["lost"].startswith("CorruptError: "), found["lost"]
    assert "checksum mismatch" in found["lost"]


_READ = """
import sys
from pyspark.sql import SparkSession
from tuskline import errors, read
spark = SparkSession.builder.remote(sys.argv[1]).getOrCreate()
try:
    read(spark, sys.argv[2])["docs"]
except errors.NotSupportedError as error:
    print("RESULT", error.what, error.repair)
"""


@pytest.mark.long
def test_a_server_without_iceberg_is_named_with_what_it_needs(tmp_path, pipeline):
    place = tmp_path / "connect"
    place.mkdir()
    with connect_server(place, env=in_pysparks_home(environment())) as server:
        done = subprocess.run(
            [sys.executable, "-c", _READ, server, str(pipeline.lake)],
            env=environment(CLIENT),
            cwd=place,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    (told,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert told.startswith(
        "RESULT this Spark session has no Iceberg start Spark, or the Spark Connect"
    )
    assert "spark.jars.packages=org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0" in told


_BUCKET = """
import json, sys
import obstore, pyspark
from pyspark.sql import SparkSession
from tests.support.connect_job import rows
from tests.support.s3 import options_at
from tuskline import errors, read

server, lake, port = sys.argv[1:]
spark = SparkSession.builder.remote(server).getOrCreate()
assert pyspark.SparkContext._jvm is None
snap = read(spark, lake, store=options_at(int(port)))
try:
    snap["docs"]
except errors.TusklineError as error:
    print("RESULT", json.dumps({"refused": f"{error.cause.name}: {error}"}))
    sys.exit()
views = snap.register_views("now")
found = {
    "epoch": snap.epoch,
    "tables": {name: rows(frame) for name, frame in snap.items()},
    "counts": {view: spark.table(view).count() for view in views},
    "again": rows(read(spark, lake, epoch=snap.epoch, store=options_at(int(port)))["docs"]),
}
print("RESULT", json.dumps(found, default=str))
"""


@pytest.mark.long
@pytest.mark.usefixtures("s3_keys")
def test_a_lake_in_a_bucket_is_read_over_spark_connect(tmp_path, spark, database, s3_port):
    """Without a setting at the server: what it needs of the bucket comes with the session, but for jars and keys, which are named."""
    database.execute(*TABLES)
    lake = f"s3://{BUCKET}/{uuid.uuid4().hex}/lake"
    without_keys = {n: v for n, v in environment().items() if n not in KEYS}
    with_jars = tuple(jars.paths(wanted=jars.S3))

    def told(name, **server):
        place = tmp_path / name
        place.mkdir()
        with connect_server(place, **server) as address:
            done = subprocess.run(
                [sys.executable, "-c", _BUCKET, address, lake, str(s3_port)],
                env=environment(CLIENT),
                cwd=place,
                capture_output=True,
                text=True,
                timeout=600,
                check=False,
            )
        log = (place / "connect.log").read_text()
        assert done.returncode == 0, done.stderr[-4000:] + log[-4000:]
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        return json.loads(line.removeprefix("RESULT "))

    with Pipeline(spark, tmp_path, database, lake=lake, store=options_at(s3_port)) as pipeline:
        pipeline.wait_for_tables("docs", "pairs", "bag")
        database.execute("UPDATE docs SET title = 'new' WHERE id = 3", "DELETE FROM bag")
        snap = pipeline.flush()
        expected = {name: rows(frame) for name, frame in snap.items()}
        found = told("served", jars=with_jars)
        refused = told("without-jars")["refused"]
        unknown = told("without-keys", jars=with_jars, env=without_keys)["refused"]
    assert found["epoch"] == snap.epoch
    assert found["tables"] == expected
    assert found["again"] == expected[f"{STREAM}.public.docs"]
    assert found["counts"] == {
        f"now_public_{name}": len(expected[f"{STREAM}.public.{name}"])
        for name in ("bag", "docs", "pairs")
    }
    assert refused.startswith(
        "NOT_SUPPORTED: Spark's JVM was started without the jars for S3\nHINT:"
    )
    assert "--packages org.apache.hadoop:hadoop-aws" in refused
    assert unknown.startswith("LAKE: s3://"), unknown
    assert "the object store refuses access to Spark's JVM" in unknown
    assert "HINT:  set valid keys" in unknown
