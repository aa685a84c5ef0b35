"""Names of a lake's tables in a REST catalog: each copy is a table, and the shown one has the name of PostgreSQL's table."""

import pytest

from spark_consumers.lake.catalog.rest_catalog import RestCatalog
from spark_consumers.lake.catalog.rest_names import own_name
from spark_consumers.lake.catalog.table_catalog import Outcome, TableId
from tests.support.lake.table_commits import SCHEMA, main_of, write
from tests.support.rest_catalog import RestServer
from walsender_bridge.errors import LakeError, NotSupportedError

PREFIX = ("lakes", "one")
OLD = TableId(("shop", "public"), "orders%t1-0a")
NEW = TableId(("shop", "public"), "orders%t2-0b")
ODD = TableId(("shop", "My%2ESchema"), "%C3%84rger%2E1%t1-0c")


@pytest.fixture
def server():
    with RestServer().running() as server:
        yield server


@pytest.fixture
def root(tmp_path):
    return f"file://{tmp_path}/lake"


@pytest.fixture
def catalog(server, root):
    return RestCatalog.opened(server.options(), prefix=PREFIX, root=root)


def reopened(server, root):
    """The catalog as another process has it."""
    return RestCatalog.for_reading(server.options(), PREFIX, root)


def names(server):
    return sorted("/".join(name[len(PREFIX) :]) for name in server.tables)


def test_a_table_is_where_the_lake_wants_it(catalog, server, root):
    catalog.create(OLD, SCHEMA, {})
    assert server.tables[*PREFIX, "shop", "public", own_name(OLD)]["location"] == (
        f"{root}/tables/shop/public/orders%t1-0a"
    )
    # What shows what the server can do is dropped again.
    assert names(server) == ["shop/public/orders_t1_0a"]


def test_a_catalog_that_puts_tables_elsewhere_is_refused(server, root, monkeypatch):
    create = server._create

    def elsewhere(space, body):
        return create(space, {**body, "location": f"{root}-elsewhere"})

    monkeypatch.setattr(server, "_create", elsewhere)
    with pytest.raises(NotSupportedError, match=r"puts a table at file://.*-elsewhere, not at"):
        RestCatalog.opened(server.options(), prefix=PREFIX, root=root)


def test_a_shown_copy_has_the_tables_name_and_the_one_before_its_own(catalog, server, root):
    catalog.create(OLD, SCHEMA, {})
    assert catalog.give_name(OLD)
    assert names(server) == ["shop/public/orders"]
    catalog.create(NEW, SCHEMA, {})
    assert catalog.give_name(NEW)
    assert names(server) == ["shop/public/orders", "shop/public/orders_t1_0a"]
    for each in (catalog, reopened(server, root)):
        assert each.load(NEW).metadata["location"].endswith("orders%t2-0b")
        assert each.load(OLD).metadata["location"].endswith("orders%t1-0a")
    # A commit goes to the copy, whatever it is called.
    commit, made = write(NEW, catalog.load(NEW))
    assert reopened(server, root).commit(commit) is Outcome.WON
    assert main_of(catalog.load(NEW)) == made


def test_names_are_those_of_postgresql(catalog, server):
    catalog.create(ODD, SCHEMA, {})
    assert catalog.give_name(ODD)
    assert names(server) == ["shop/My.Schema/Ärger.1"]


def test_a_table_whose_name_the_catalog_refuses_has_its_own_name(catalog, server, root):
    percent = TableId(("shop", "public"), "100%25%t1-0d")
    server.refused = "%25"
    catalog.create(percent, SCHEMA, {})
    for each in (catalog, reopened(server, root)):
        assert not each.give_name(percent)
        commit, made = write(percent, each.load(percent))
        assert each.commit(commit) is Outcome.WON
        assert main_of(each.load(percent)) == made
    assert names(server) == ["shop/public/100_25_t1_0d"]


def test_a_schema_whose_name_the_server_refuses_is_refused_with_its_reason(catalog, server):
    server.refused = "%25"
    with pytest.raises(LakeError, match="refuses the request: 400 Ambiguous URI"):
        catalog.create(TableId(("shop", "100%25"), "t%t1-0e"), SCHEMA, {})


def test_a_server_may_separate_the_parts_of_a_namespace_by_a_character_of_its_own(server, root):
    server.separator, server.refused = "%2E", "%1F"
    catalog = RestCatalog.opened(server.options(), prefix=PREFIX, root=root)
    catalog.create(ODD, SCHEMA, {})
    catalog.create(OLD, SCHEMA, {})
    assert catalog.give_name(ODD)
    assert names(server) == ["shop/My.Schema/Ärger.1", "shop/public/orders_t1_0a"]
    assert reopened(server, root).load(ODD) is not None


def test_a_name_that_something_else_has_is_left_alone(catalog, server, root):
    catalog.create(OLD, SCHEMA, {})
    plain = RestCatalog.opened(server.options(), prefix=PREFIX)
    plain.create(TableId(("shop", "public"), "orders"), SCHEMA, {})
    assert not catalog.give_name(OLD)
    assert catalog.load(OLD) is not None
    assert names(server) == ["shop/public/orders", "shop/public/orders_t1_0a"]


def test_a_writer_that_renames_late_hides_no_table_and_drops_no_other(catalog, server, root):
    """It has slept since `orders` was the old copy, and gives that its own name back, to drop it."""
    catalog.create(OLD, SCHEMA, {})
    catalog.give_name(OLD)
    sleeper = reopened(server, root)
    assert sleeper.load(OLD) is not None
    catalog.create(NEW, SCHEMA, {})
    catalog.give_name(NEW)
    catalog.drop(OLD)
    sleeper._rename(OLD, "orders", own_name(OLD))
    assert names(server) == ["shop/public/orders_t1_0a"]
    # The new copy is found under the old one's name, and gets its own again.
    sleeper.drop(OLD)
    assert catalog.load(NEW).metadata["location"].endswith("orders%t2-0b")
    assert catalog.give_name(NEW)
    assert names(server) == ["shop/public/orders"]


def test_a_copy_is_dropped_by_whatever_name_it_has(catalog, server, root):
    catalog.create(OLD, SCHEMA, {})
    catalog.give_name(OLD)
    reopened(server, root).drop(OLD)
    assert names(server) == []
    catalog.drop(OLD)
