"""Tables in Iceberg's own REST server, over PostgreSQL: what a lake asks of a catalog, asked of one that is not ours."""

import pytest

from spark_consumers.lake.catalog.rest_catalog import RestCatalog
from spark_consumers.lake.catalog.table_catalog import Outcome, TableId
from tests.support.iceberg_server import iceberg_server
from tests.support.lake.controlled import CONTROL, TABLES, make_tables, race_of_takeovers
from tests.support.lake.table_commits import (
    ORDERS,
    SCHEMA,
    main_of,
    race_of_writers,
    snapshots,
    write,
)
from tests.support.servers import fresh_database

ROOT, PREFIX = "s3://lakes/a%20lake", ("lakes", "of.tests")


@pytest.fixture(scope="module")
def server(tmp_path_factory, pg_servers, s3_port):
    s3 = f"http://127.0.0.1:{s3_port}"
    with (
        fresh_database(pg_servers.get()) as own,
        iceberg_server(tmp_path_factory.mktemp("rest"), own.dsn, s3) as options,
    ):
        yield options


@pytest.fixture
def catalog(server):
    catalog = RestCatalog.opened(server, prefix=PREFIX, root=ROOT)
    for table in (CONTROL, *TABLES):
        catalog.drop(table)
    make_tables(catalog)
    return catalog


def test_what_the_server_can_do_is_found_out(catalog):
    assert catalog.supports_v3
    assert catalog.supports_branches
    # It has the request, but says that changes are made that it leaves out.
    assert not catalog.supports_multi_table
    assert catalog.load(ORDERS).metadata["format-version"] == 3


def test_a_table_is_created_once(catalog):
    assert catalog.create(ORDERS, SCHEMA, {}) is Outcome.LOST


def test_a_table_is_where_the_lake_wants_it_and_found_by_every_name(catalog, server):
    assert catalog.load(ORDERS).metadata["location"] == f"{ROOT}/tables/shop/public/orders%t1-0a"
    odd = TableId(("shop", "My%2ESchema"), "%C3%84rger%2E1%t1-0c")
    percent = TableId(("shop", "public"), "100%25%t1-0d")
    for table, is_named in ((ORDERS, True), (odd, True), (percent, False)):
        catalog.drop(table)
        assert catalog.create(table, SCHEMA, {}) is Outcome.WON
        assert catalog.give_name(table) is is_named
        other = RestCatalog.for_reading(server, PREFIX, ROOT)
        commit, made = write(table, other.load(table))
        assert other.commit(commit) is Outcome.WON
        assert main_of(catalog.load(table)) == made
        catalog.drop(table)
        assert other.load(table) is None


def test_a_stale_writer_changes_nothing(catalog):
    there = catalog.load(ORDERS)
    first, made = write(ORDERS, there)
    stale, _ = write(ORDERS, there)
    assert catalog.commit(first) is Outcome.WON
    assert catalog.commit(stale) is Outcome.LOST
    assert snapshots(catalog.load(ORDERS)) == [made]


def test_of_writers_that_meet_one_has_the_commit(catalog):
    for _ in range(3):
        race_of_writers(catalog)


@pytest.mark.long
def test_of_writers_that_meet_one_has_the_commit_100_times(catalog):
    for _ in range(100):
        race_of_writers(catalog)


def test_of_takeovers_that_meet_one_has_the_lake(catalog):
    for _ in range(2):
        race_of_takeovers(catalog)
