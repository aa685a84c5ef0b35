"""Is a lake what it should be: equal to PostgreSQL, and nothing on its disk that nobody needs."""

from datetime import UTC
from pathlib import Path

import psycopg

from spark_consumers.lake.catalog.folder_catalog import FolderCatalog
from spark_consumers.lake.catalog.links import folders
from spark_consumers.lake.catalog.open_catalog import for_reading
from spark_consumers.lake.format.checksums import sums_of
from spark_consumers.lake.format.iceberg import IcebergFormat
from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.store.lake_store import FROM_ENVIRONMENT
from spark_consumers.lake.store.place import is_object
from walsender_bridge.demo.compare import comparable, difference, postgres_rows, shape_of


def assert_equal(dsn, snapshot, *, counted=True, only=None):
    """Every table of the snapshot has PostgreSQL's rows, value by value; and as many as it says, if it has `counted` them.

    `only`: the tables that are compared; none: all of them, without views.
    """
    with psycopg.connect(dsn, autocommit=True) as connection:
        at_sources = snapshot.manifest.at_sources
        views = {view.full_name(n) for n, view in snapshot.manifest.views.items() if view.tables}
        for name in only or [each for each in snapshot.tables if each not in views]:
            full = at_sources.get(name, name)
            shape = shape_of(connection, full.partition(".")[2])
            expected = [comparable(row) for row in postgres_rows(connection, shape)]
            actual = [comparable(row) for row in _rows(snapshot[name])]
            found = difference(shape, expected, actual)
            assert found.equal, found
            assert not counted or snapshot.manifest.tables[full].rows == len(expected)


def _rows(frame):
    """The rows with times as moments: Spark hands out the local time of one, without its zone."""
    moments = [kind == "timestamp" for _, kind in frame.dtypes]
    for row in frame.collect():
        yield tuple(
            value.astimezone(UTC) if is_moment and value is not None else value
            for value, is_moment in zip(row, moments, strict=True)
        )


def assert_no_orphans(spark, lake, store=FROM_ENVIRONMENT):
    """Every data file of the lake is one of a snapshot that some manifest names."""
    chain = open_chain(lake, store)
    tables = IcebergFormat(spark, "", for_reading(chain) or FolderCatalog(chain.root))
    wanted = set()
    links = list(chain.links())
    shown = {t.path for m in links for t in m.readable.values()}
    snapshots = {(t.path, t.snapshot_id) for m in links for t in m.versions if t.path in shown}
    for path, snapshot in snapshots:
        for file in tables.scan(str(chain.root / path), snapshot):
            wanted |= {file.path, *file.deletes}
            if file.vector is not None:
                wanted.add(str(chain.root / path / file.vector.puffin))
    places = [table / "data" for table in folders(chain.root)]
    sealed = {str(file) for place in places for file in place.glob(".*.crc")}
    with_sums = {} if is_object(chain.root) else {str(sums_of(Path(file))) for file in wanted}
    assert sealed ^ set(with_sums) == set()
    found = {str(file) for place in places for file in place.glob("*")} - sealed
    assert found - wanted == set()
    assert wanted - found == set()
    assert not list(chain.staging.glob("*"))
    assert not list(chain.root.glob("_tuskline/epochs/.*"))
