"""What a lake's writer keeps up beside its epochs: leases at the log, and tables whose source is gone."""

from dataclasses import replace

import pytest

from spark_consumers.lake.manifest.chain import (
    COPIED,
    LEFT,
    LIVE,
    Manifest,
    StreamPosition,
    TableVersion,
)
from spark_consumers.lake.tables.removed import departed, without_departed
from spark_consumers.lake.writer.leases import LEASE, RENEWAL, renewal_due


@pytest.mark.parametrize(
    ("since", "lease", "due"),
    [
        (RENEWAL - 1, LEASE, False),
        (RENEWAL, LEASE, True),
        (float("inf"), LEASE, True),
        # A short lease cannot wait for an hour.
        (0.9, 4.0, False),
        (1.0, 4.0, True),
    ],
)
def test_a_lease_is_renewed_hourly_and_long_before_it_ends(
    since: float, lease: float, *, due: bool
) -> None:
    assert renewal_due(5000.0, 5000.0 - since, lease) is due


def test_tables_of_a_source_that_is_gone_stay_as_they_are_and_its_stream_ends() -> None:
    table = TableVersion("path", "iceberg", 7, "", ("id",), (), 1, 1, 9, 1)
    tables = {
        "a.public.t": table,
        "b.public.live": table,
        "b.public.left": replace(table, state=LEFT),
    }
    copies = {"b.public.copied": replace(table, state=COPIED)}
    streams = {s: StreamPosition(1, 10, 10, 5) for s in "ab"}
    head = Manifest("lake", 3, 1, 0, 1, 0.0, streams=streams, tables=tables, copies=copies)
    assert departed(head, {"a", "b"}) == []
    assert without_departed(head, {"a", "b"}) == head
    assert departed(head, {"a"}) == ["b.public.copied", "b.public.live"]
    after = without_departed(head, {"a"})
    # A copy that was never shown is of a moment that no epoch has.
    assert {n: t.state for n, t in after.tables.items()} == {
        "a.public.t": LIVE,
        "b.public.live": LEFT,
        "b.public.left": LEFT,
    }
    assert not after.copies
    assert after.tables["b.public.live"].snapshot_id == 7
    assert after.tables["b.public.live"].as_of == 1
    assert set(after.streams) == {"a"}
