"""Whole epochs in Project Nessie, a catalog of others: one commit of all tables, fenced by the control table."""

import pytest

from spark_consumers.lake.catalog.rest_catalog import RestCatalog
from spark_consumers.lake.catalog.table_catalog import Outcome
from tests.support.lake.controlled import (
    CONTROL,
    TABLES,
    Writer,
    control_of,
    mains,
    make_tables,
    new_snapshot,
    race_of_takeovers,
)
from tests.support.lake.table_commits import (
    LINES,
    ORDERS,
    SCHEMA,
    race_of_writers,
    write,
)
from tests.support.nessie import nessie
from walsender_bridge.errors import NotSupportedError

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory, s3_port):
    with nessie(tmp_path_factory.mktemp("nessie"), s3_port) as options:
        yield options


@pytest.fixture
def catalog(server):
    catalog = RestCatalog.opened(server, ("shop",))
    for table in (CONTROL, *TABLES):
        catalog.drop(table)
    make_tables(catalog)
    return catalog


def test_what_the_server_can_do_is_found_out(catalog):
    assert (catalog.supports_v3, catalog.supports_multi_table) == (False, True)
    # For the lack of which it cannot have a lake.
    assert not catalog.supports_branches
    assert catalog.load(ORDERS).metadata["format-version"] == 2
    assert catalog.load(ORDERS).config["s3.endpoint"].startswith("http://127.0.0.1:")
    catalog.drop(LINES)
    with pytest.raises(NotSupportedError, match="does not support version 3"):
        catalog.create(LINES, SCHEMA, {"format-version": "3"})
    assert catalog.load(LINES) is None


def test_a_table_is_created_once(catalog):
    assert catalog.create(ORDERS, SCHEMA, {}) is Outcome.LOST


def test_a_stale_writers_epoch_is_refused_and_changes_no_table(catalog):
    old = Writer(catalog, "a")
    whole, made = old.prepared()
    assert old.publish(whole) is Outcome.WON
    assert mains(catalog) == made
    stale, _ = old.prepared()
    newer = Writer(catalog, "b")
    before = [catalog.load(table).metadata for table in (CONTROL, *TABLES)]
    assert old.publish(stale) is Outcome.LOST
    assert [catalog.load(table).metadata for table in (CONTROL, *TABLES)] == before
    whole, made = newer.prepared()
    assert newer.publish(whole) is Outcome.WON
    assert mains(catalog) == made


def test_an_epoch_is_in_no_table_if_one_has_changed(catalog):
    writer = Writer(catalog, "a")
    whole, made = writer.prepared()
    assert writer.publish(whole) is Outcome.WON
    whole, _ = writer.prepared()
    other, snapshot = write(LINES, catalog.load(LINES))
    assert catalog.commit(other) is Outcome.WON
    assert writer.publish(whole) is Outcome.LOST
    assert mains(catalog) == [made[0], snapshot]
    assert control_of(catalog).epoch == 1


def test_of_two_first_takeovers_one_has_the_lake_though_main_is_not_looked_at(catalog):
    control = control_of(catalog)
    names = "ab"
    commits = [control.taken_over(1, name, new_snapshot(control)) for name in names]
    assert [catalog.commit(commit) for commit in commits] == [Outcome.WON, Outcome.LOST]
    assert control_of(catalog).writer == "a"
    # Else the column would not be needed.
    there = catalog.load(ORDERS)
    firsts = [write(ORDERS, there)[0] for _ in names]
    assert [catalog.commit(commit) for commit in firsts] == [Outcome.WON, Outcome.WON]


def test_of_writers_that_meet_one_has_the_commit(catalog):
    """100 races of 8 writers that have loaded the same table."""
    for _ in range(100):
        race_of_writers(catalog)


def test_of_takeovers_that_meet_one_has_the_lake(catalog):
    for _ in range(10):
        race_of_takeovers(catalog)
