"""A lake whose tables are in an Iceberg REST catalog, from PostgreSQL to what engines read."""

import pytest

from spark_consumers import read
from spark_consumers.spark.lake_catalog import LakeCatalog
from tests.support.capture_stack import STREAM
from tests.support.lake_pipeline import TABLES, Pipeline
from tests.support.rest_catalog import RestServer

NAMESPACE = ("lakes", "one")


@pytest.fixture(scope="module")
def server():
    with RestServer().running() as server:
        yield server


class RestPipeline(Pipeline):
    """A pipeline into a lake in the catalog of this server."""

    server: RestServer

    def lakehouse(self, sources=None, **options):
        rest = LakeCatalog(self.server.uri, namespace=NAMESPACE, allow_http=True)
        return super().lakehouse(sources, **{"rest": rest, **options})


@pytest.fixture
def pipeline(spark, tmp_path, database, server):
    database.execute(*TABLES)
    server.tables.clear()
    server.files.clear()
    made = RestPipeline(spark, tmp_path, database)
    made.server = server
    with made as running:
        running.wait_for_tables("docs", "pairs", "bag")
        yield running


def catalog_of(server):
    """The catalog as PyIceberg reads it."""
    load_catalog = pytest.importorskip("pyiceberg.catalog").load_catalog
    return load_catalog("lake", type="rest", uri=server.uri)


def of_database(database, statement):
    with database.connect() as connection:
        return sorted(connection.execute(statement).fetchall(), key=repr)


def check(pipeline, database, server):
    """What PostgreSQL has is what `read` returns, and what another engine reads through the catalog by the tables' names."""
    snapshot = pipeline.flush()
    # The names are given, and the epoch is shown, with the next look at the latest.
    pipeline.house.run_once()
    engine = catalog_of(server)
    for table, columns in (("docs", ["id", "title"]), ("pairs", ["a", "b"]), ("bag", ["a", "t"])):
        wanted = of_database(database, f"SELECT {', '.join(columns)} FROM {table}")
        found = sorted(map(tuple, snapshot[table].select(*columns).collect()), key=repr)
        assert found == wanted, table
        there = engine.load_table((*NAMESPACE, STREAM, "public", table))
        read = there.scan(selected_fields=tuple(columns)).to_arrow().to_pylist()
        assert sorted((tuple(r[c] for c in columns) for r in read), key=repr) == wanted, table
    control = engine.load_table((*NAMESPACE, "tuskline_epochs"))
    assert control.current_snapshot().summary["tuskline.epoch"] == str(snapshot.epoch)
    assert control.scan().to_arrow().num_rows == 0
    return snapshot


def test_epochs_are_the_databases_rows_for_read_and_for_engines(pipeline, database, server):
    check(pipeline, database, server)
    database.execute(
        "UPDATE docs SET title = 'other' WHERE id = 3",
        "UPDATE docs SET id = 30 WHERE id = 4",
        "DELETE FROM docs WHERE id = 5",
        "DELETE FROM bag WHERE a IS NULL",
        "INSERT INTO docs SELECT g, 'n', 'b', g, 1 FROM generate_series(100, 104) g",
    )
    first = check(pipeline, database, server)
    database.execute("TRUNCATE bag", "ALTER TABLE docs ADD extra text DEFAULT 'x'")
    database.execute("INSERT INTO docs (id, extra) VALUES (200, 'y')")
    snapshot = check(pipeline, database, server)
    assert {r.extra for r in snapshot["docs"].filter("id > 199").collect()} == {"y"}
    # An earlier epoch is as it was.
    assert read(pipeline.spark, pipeline.lake, epoch=first.epoch)["bag"].count() == 4
