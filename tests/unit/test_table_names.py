"""Names of tables on the command line: `schema.table` is enough where only one table of the lake is meant."""

from dataclasses import replace
from pathlib import Path

import pytest

from spark_consumers.lake.manifest.chain import Manifest, StreamPosition, TableVersion, open_chain
from walsender_bridge.cli.table import full_names
from walsender_bridge.config import Config, load_config
from walsender_bridge.errors import UsageError


@pytest.fixture
def settings(tmp_path: Path) -> Config:
    """Two sources, `shop` and `hr`, and a lake with their tables, one not copied, and one of a former source."""
    lake = tmp_path / "lake"
    (tmp_path / "tuskline.toml").write_text(
        f'[log]\ndata_dir = "log"\n[lake]\nuri = "{lake}"\n[[log_server]]\nlisten = "127.0.0.1:1"\n'
        'data_dir = "k"\n[[source]]\nname = "shop"\ndsn = ""\n[[source]]\nname = "hr"\ndsn = ""\n'
    )
    chain = open_chain(lake)
    chain.initialise("log", "iceberg")
    names = ("shop.public.orders", "hr.public.staff", "hr.public.notes", "old.public.staff")
    table = TableVersion("p", "iceberg", 1, "", ("id",), (), 5, 1, 10, 7)
    streams = {name: StreamPosition(1, 100, 7, 3) for name in ("shop", "hr")}
    tables = dict.fromkeys(names, table)
    head = Manifest("lake", 1, 0, 0, 1, 1.0, streams=streams, tables=tables)
    chain.publish(replace(head, not_copied={"shop.public.notes": "a value is too large"}), None)
    return load_config(tmp_path / "tuskline.toml")


def test_the_only_table_of_a_name_needs_no_stream(settings):
    names = ["public.staff", "shop.public.orders", "hr.public.staff", "hr.public.new"]
    assert full_names(settings, names) == ["hr.public.staff", "shop.public.orders", "hr.public.new"]


def test_two_tables_of_a_name_are_both_named(settings):
    with pytest.raises(UsageError, match=r"'public\.notes' is ambiguous") as raised:
        full_names(settings, ["public.notes"])
    assert raised.value.repair == "name one of hr.public.notes, shop.public.notes"


def test_a_table_to_be_added_is_none_that_the_lake_has(settings):
    with pytest.raises(UsageError, match="ambiguous"):
        full_names(settings, ["public.staff"], in_lake=False)


@pytest.mark.parametrize("name", ["public.unknown", "orders", ""])
def test_a_name_that_no_table_has_needs_its_stream(settings, name):
    with pytest.raises(UsageError) as raised:
        full_names(settings, [name])
    assert raised.value.repair == "write stream.schema.table; the streams are shop, hr"


def test_a_table_may_be_named_as_in_the_lake(settings):
    chain = open_chain(Path(settings.lake.uri))
    head = chain.head()
    assert head is not None
    tables = {
        **head.tables,
        "shop.public.orders": replace(head.tables["shop.public.orders"], lake_name="shop.sales.o"),
        # Its name in the lake is that of another table at the source, which is meant.
        "hr.public.staff": replace(head.tables["hr.public.staff"], lake_name="hr.public.notes"),
    }
    chain.publish(replace(head.next(1.0), tables=tables), head)
    names = ["sales.o", "shop.sales.o", "shop.public.orders", "hr.public.notes"]
    assert full_names(settings, names) == ["shop.public.orders", "hr.public.notes"]
    with pytest.raises(UsageError):
        full_names(settings, ["sales.o"], in_lake=False)
