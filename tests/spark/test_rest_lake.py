"""A lake whose tables are in an Iceberg REST catalog, from PostgreSQL to what engines read."""

import pytest

from spark_consumers.spark.lake_catalog import LakeCatalog
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
    made = RestPipeline(spark, tmp_path, database)
    made.server = server
    with made as running:
        running.wait_for_tables("docs", "pairs", "bag")
        yield running


def rows(snapshot, name):
    return sorted(map(tuple, snapshot[name].collect()), key=repr)


def of_database(database, statement):
    with database.connect() as connection:
        return sorted(connection.execute(statement).fetchall(), key=repr)


def test_epochs_of_a_lake_in_a_catalog_are_the_databases_rows(pipeline, database):
    snapshot = pipeline.flush()
    ids = "SELECT id, title, n FROM docs"
    assert sorted(r[0] for r in snapshot["docs"].select("id").collect()) == list(range(1, 10))
    database.execute(
        "UPDATE docs SET title = 'other' WHERE id = 3",
        "UPDATE docs SET id = 30 WHERE id = 4",
        "DELETE FROM docs WHERE id = 5",
        "DELETE FROM bag WHERE a IS NULL",
        "INSERT INTO docs SELECT g, 'n', 'b', g, 1 FROM generate_series(100, 104) g",
    )
    snapshot = pipeline.flush()
    found = sorted(map(tuple, snapshot["docs"].select("id", "title", "n").collect()), key=repr)
    assert found == of_database(database, ids)
    assert snapshot["bag"].count() == 4
    database.execute("TRUNCATE bag", "ALTER TABLE docs ADD extra text DEFAULT 'x'")
    database.execute("INSERT INTO docs (id, extra) VALUES (200, 'y')")
    snapshot = pipeline.flush()
    assert snapshot["bag"].count() == 0
    assert {r.extra for r in snapshot["docs"].filter("id > 199").collect()} == {"y"}
