"""What changes in a table's metadata when its layout does."""

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from spark_consumers.lake.layout.arrangement import Arrangement, Field
from spark_consumers.lake.layout.evolution import OPTIONS, Layouts, arrangement, changes
from walsender_bridge.errors import NotSupportedError
from walsender_bridge.postgres.table_layout import SortField, TableLayout

COLUMNS = pa.schema(
    [
        ("id", pa.int64()),
        ("at", pa.timestamp("us")),
        ("at_day", pa.date32()),
        ("x", pa.float64()),
        ("tags", pa.list_(pa.int32())),
    ]
)
NEW = Layouts(
    columns=COLUMNS,
    ids={name: number for number, name in enumerate(COLUMNS.names, 1)},
    specs=[{"spec-id": 0, "fields": []}],
    spec=0,
    last_field=999,
    order={"order-id": 0, "fields": []},
    properties={"write.parquet.compression-codec": "zstd"},
)
DEFAULTS = {"write.parquet.compression-codec": "zstd"}


def after(there, layout):
    """The metadata after these changes."""
    made = changes(there, layout, DEFAULTS, "shop.public.t")
    specs = [*there.specs, made.spec] if made.spec else there.specs
    kept = {n: v for n, v in there.properties.items() if n not in made.removed}
    return replace(
        there,
        specs=specs,
        spec=specs[-1]["spec-id"] if made.spec else there.spec,
        last_field=max([there.last_field, *(f["field-id"] for f in specs[-1]["fields"])]),
        order=made.order or there.order,
        properties={**kept, **made.properties},
    )


def names(there):
    return [(f["field-id"], f["name"]) for f in there.specs[-1]["fields"]]


def test_a_layout_that_is_there_changes_nothing():
    layout = TableLayout.parse(["day(at)", "id"], ["id desc"], {"team": "a"})
    there = after(NEW, layout)
    assert not changes(there, layout, DEFAULTS, "t")
    assert not changes(NEW, TableLayout(), DEFAULTS, "t")


def test_a_partition_field_that_comes_back_has_its_number_and_name():
    first = after(NEW, TableLayout.parse(["day(at)", "bucket(4, id)"]))
    # A column has the name that the field would have.
    assert names(first) == [(1000, "at_day_"), (1001, "id_bucket_4")]
    second = after(first, TableLayout.parse(["at_day", "bucket(5, id)"]))
    assert names(second) == [(1002, "at_day"), (1003, "id_bucket_5")]
    third = after(second, TableLayout.parse(["bucket(4, id)", "day(at)"]))
    assert names(third) == [(1001, "id_bucket_4"), (1000, "at_day_")]


def test_a_name_of_an_earlier_field_is_not_given_to_another():
    first = after(NEW, TableLayout.parse(["day(at)"]))
    renamed = {**first.specs[-1]["fields"][0], "name": "at_day"}
    first = replace(first, specs=[first.specs[0], {"spec-id": 1, "fields": [renamed]}])
    assert names(after(first, TableLayout.parse(["at_day"]))) == [(1001, "at_day_")]


def test_names_of_fields_are_of_ascii_letters():
    columns = NEW.columns.append(pa.field("Größe 列", pa.date32()))
    there = replace(NEW, columns=columns, ids={**NEW.ids, "Größe 列": 6})
    layout = TableLayout.parse(['day("Größe 列")', '"Größe 列"', "day(at)"])
    assert names(after(there, layout)) == [
        (1000, "Gr__e __day"),
        (1001, "Gr__e _"),
        (1002, "at_day_"),
    ]


def test_options_of_columns_that_the_table_lacks_are_left_out():
    option = "write.metadata.metrics.column."
    options = {f"{option}{name}": "none" for name in ("x", "tags.element", "gone")}
    found = after(NEW, TableLayout.parse(options=options)).properties
    assert {n for n in found if n.startswith(option)} == {f"{option}x", f"{option}tags.element"}


def test_files_are_written_as_the_metadata_says():
    options = {"write.parquet.compression-codec": "gzip", "write.parquet.compression-level": "3"}
    layout = TableLayout.parse(["bucket(4, id)", "hour(at)"], ["at desc nulls last"], options)
    assert arrangement(after(NEW, layout)) == Arrangement(
        spec=1,
        fields=(Field(1000, "id", "bucket", 4), Field(1001, "at", "hour")),
        order=1,
        sort=(SortField("at", descending=True),),
        codec="gzip",
        level=3,
    )


def test_options_that_go_leave_the_lake_s_own_values():
    options = {"write.parquet.compression-codec": "gzip", "team": "a", "more": "1"}
    first = after(NEW, TableLayout.parse(options=options))
    assert json.loads(first.properties[OPTIONS]) == sorted(options)
    # What a user has set at the table is the user's.
    first = replace(first, properties={**first.properties, "own": "x"})
    second = after(first, TableLayout.parse(options={"team": "b"}))
    assert second.properties == {**NEW.properties, "team": "b", OPTIONS: '["team"]', "own": "x"}


@pytest.mark.parametrize(
    ("partition", "sort", "message"),
    [
        (["gone"], [], "partition field gone: the table has no column 'gone'"),
        ([], ["gone"], "sort field gone: the table has no column 'gone'"),
        (["x"], [], "partition field x: a column of type double cannot have it"),
        (["hour(at_day)"], [], r"partition field hour\(at_day\): a column of type date32"),
        ([], ["tags"], "sort field tags: an array has no order"),
    ],
)
def test_a_layout_that_a_table_cannot_have_is_refused_by_name(partition, sort, message):
    with pytest.raises(NotSupportedError, match=message) as found:
        changes(NEW, TableLayout.parse(partition, sort), DEFAULTS, "shop.public.t")
    assert found.value.where == "shop.public.t"
    assert "[[lake.tables]]" in found.value.repair
