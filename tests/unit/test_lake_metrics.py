"""What a scrape, and `status`, say of tables that do not follow and of copies that are under way."""

from dataclasses import replace

from spark_consumers.lake.manifest.chain import Manifest, StreamPosition, TableVersion
from spark_consumers.lake.manifest.view_version import ViewVersion
from spark_consumers.lake.status import CopyStatus
from walsender_bridge.observability import metrics
from walsender_bridge.observability.observation import Observation

HELD = TableVersion(
    *("p", "iceberg", 1, "", ("id",), (), 5, 1, 10, 7, "held"),
    reason="it lost t",
    quarantined_rows=5,
    skipped_rows=2,
)
COPY = CopyStatus(0.0, 5, 600, 4, 1, 1.0, 120.0)


def test_held_tables_and_copies_are_told():
    streams = {"shop": StreamPosition(1, 100, 7, 30)}
    lake = Manifest("lake", 9, 40, 39, 2, 0.0, streams=streams, tables={"shop.public.a": HELD})
    seen = Observation(
        at=0.0,
        up=None,
        processes=[],
        sources=[],
        log=None,
        lake=lake,
        copying={"shop.public.b": COPY},
    )
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for metric in metrics._lake(seen)
        for sample in metric.samples
    }
    assert samples["tuskline_lake_table_behind", "shop.public.a", "held"] == 1
    assert samples["tuskline_lake_table_quarantined_rows", "shop.public.a"] == 3
    assert samples["tuskline_lake_table_skipped_rows", "shop.public.a"] == 2
    assert samples["tuskline_lake_copy_bytes", "shop.public.b"] == 600
    assert samples["tuskline_lake_copy_pieces_done", "shop.public.b"] == 1
    assert "table shop.public.a holds the epochs back: it lost t" in seen.problems


def test_a_view_with_the_name_that_a_table_has_at_its_source_has_samples_of_its_own():
    table = replace(HELD, lake_name="shop.raw.a")
    view = ViewVersion("SELECT", table=replace(HELD, rows=4), tables=("shop.public.a",))
    lake = Manifest(
        *("lake", 9, 40, 39, 2, 0.0),
        tables={"shop.public.a": table},
        views={"public.a": view},
    )
    assert {*lake.readable} == {"shop.raw.a", "shop.public.a"}
    seen = Observation(at=0.0, up=None, processes=[], sources=[], log=None, lake=lake)
    rows = [
        (sample.labels["table"], sample.value)
        for metric in metrics._lake(seen)
        for sample in metric.samples
        if sample.name == "tuskline_lake_table_rows"
    ]
    assert sorted(rows) == [("shop.public.a", 10), ("shop.public.a (in the lake)", 4)]
