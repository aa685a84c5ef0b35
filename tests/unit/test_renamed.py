"""Which tables get another name in the lake without a copy, and what becomes of all that is known by names (`tables.renamed`)."""

from dataclasses import replace
from typing import Any

import pytest

from spark_consumers.lake.format.data_files import remove_orphans
from spark_consumers.lake.manifest.chain import Manifest
from spark_consumers.lake.manifest.feed_version import FeedVersion
from spark_consumers.lake.manifest.table_version import (
    LEFT,
    LIVE,
    PAUSED,
    STALE,
    StreamPosition,
    TableVersion,
)
from spark_consumers.lake.manifest.view_version import ViewVersion
from spark_consumers.lake.tables.noticed import compare
from spark_consumers.lake.tables.renamed import Naming, moved, renamed
from spark_consumers.lake.tables.shape import Publication, Shape
from walsender_bridge.postgres.column_masks import HASH, ColumnMask

A, B, C = (f"shop.public.{name}" for name in "abc")
ALL = "insert, update, delete, truncate"
PLAIN = Naming(lambda _: None, lambda _: "")
FED = Naming(lambda _: None, lambda name: f"{name}_changes")


def table(oid: int, **more: Any) -> TableVersion:
    made = TableVersion(f"tables/{oid}", "iceberg", 1, "", ("id",), (), 0, 0, 0, oid, layout=())
    return replace(made, **more)


def head(**tables: TableVersion) -> Manifest:
    named = {f"shop.public.{name}": each for name, each in tables.items()}
    return Manifest("lake", 1, 1, 0, 1, 0.0, tables=named)


@pytest.mark.parametrize(
    ("before", "oids", "expected"),
    [
        ({"a": 1}, {"a": 1}, {}),
        ({"a": 1}, {"b": 1}, {"a": "b"}),
        # A swap, and a cycle.
        ({"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": "b", "b": "a"}),
        ({"a": 1, "b": 2, "c": 3}, {"b": 1, "c": 2, "a": 3}, {"a": "b", "b": "c", "c": "a"}),
        # A new table has the earlier name.
        ({"a": 1}, {"a": 9, "b": 1}, {"a": "b"}),
        # The name is of a table that was dropped: it is held until the copy, as is the one in whose chain it is.
        ({"a": 1, "b": 2}, {"b": 1}, {}),
        ({"a": 1, "b": 2, "c": 3}, {"b": 1, "c": 2}, {}),
        # Not published any more, and of another source.
        ({"a": 1}, {}, {}),
    ],
)  # fmt: skip
def test_14_names_move_where_no_other_table_stays(before, oids, expected) -> None:
    link = head(**{name: table(oid) for name, oid in before.items()})
    published = {f"shop.public.{name}": oid for name, oid in oids.items()}
    full = {f"shop.public.{name}": f"shop.public.{now}" for name, now in expected.items()}
    assert renamed(link, "shop", published, PLAIN) == full
    after = moved(link, full, PLAIN)
    # Each table has one name, and none is lost.
    assert sorted(t.path for t in after.tables.values()) == sorted(
        t.path for t in link.tables.values()
    )
    assert all(after.tables[now] is link.tables[name] for name, now in full.items())
    assert not renamed(link, "other", published, PLAIN)


@pytest.mark.parametrize(
    "more", [{"state": PAUSED}, {"state": STALE}, {"state": LEFT}, {"resync": "asked for"}]
)
def test_14_a_table_that_does_not_follow_keeps_its_name(more) -> None:
    assert not renamed(head(a=table(1, **more)), "shop", {B: 1}, PLAIN)
    # Nor does a table get the name of one that is to be copied.
    stays = head(a=table(1, **more), b=table(2))
    expected = {B: A} if more.get("state") == LEFT else {}
    assert renamed(stays, "shop", {B: 1, A: 2}, PLAIN) == expected


def test_14_another_table_that_has_got_the_oid_of_a_dropped_one_is_not_taken_for_it() -> None:
    """After four billion OIDs. What the catalog says is the same, but for the transaction that created the table."""
    columns = ((1, "id", 23, "690"),)
    shape = Shape(1, 1, ("id",), (), columns, "5 600", ALL, ("all tables",), born="690")
    link = head(a=table(1, shape=shape.dump()))
    streams = {"shop": StreamPosition(1, 50, 0, 0)}
    link = replace(link, streams=streams)
    assert renamed(link, "shop", {B: 1}, PLAIN) == {A: B}
    other = replace(shape, columns=((1, "id", 23, "9"),), born="9")
    for seen, expected in (shape, {A: B}), (other, {}):
        # The table is compared under the name that it has in the lake until its names move.
        publication = Publication({"public.a": seen}, frozenset())
        after, reasons = compare(link, "shop", publication, (), holds=True)
        assert renamed(after, "shop", {B: 1}, PLAIN) == expected
        assert bool(reasons) != bool(expected)


def test_14_a_copy_that_is_not_shown_keeps_its_name() -> None:
    link = head(a=table(1))
    assert not renamed(replace(link, copies={A: table(1)}), "shop", {B: 1}, PLAIN)
    assert not renamed(replace(link, copies={B: table(1)}), "shop", {B: 1}, PLAIN)


def test_14_other_settings_under_the_new_name_are_a_reason_to_copy() -> None:
    masked = Naming(lambda name: name == A, lambda _: "")
    assert not renamed(head(a=table(1)), "shop", {B: 1}, masked)
    # Of a swap, too: neither gets the name of the other one.
    assert not renamed(head(a=table(1), b=table(2)), "shop", {B: 1, A: 2}, masked)
    # One that could get the name of the first one does not, as that stays.
    assert not renamed(head(a=table(1), c=table(3)), "shop", {B: 1, A: 3}, masked)


def test_14_a_feed_goes_with_its_table_and_takes_no_other_name() -> None:
    feeds = {
        f"{name}_changes": FeedVersion(name, f"tables/{n}", table(10 + n))
        for n, name in enumerate((A, B), 1)
    }
    link = replace(head(a=table(1), b=table(2)), feeds=feeds)
    swap = {A: B, B: A}
    assert renamed(link, "shop", {A: 2, B: 1}, FED) == swap
    after = moved(link, swap, FED).feeds
    assert after[f"{A}_changes"] == replace(feeds[f"{B}_changes"], of=A)
    assert after[f"{B}_changes"] == replace(feeds[f"{A}_changes"], of=B)
    # A table has the name that the feed would get.
    other = replace(link, tables={**link.tables, f"{C}_changes": table(3)})
    assert not renamed(other, "shop", {C: 1, B: 2, f"{C}_changes": 3}, FED)


def test_14_views_over_a_name_that_moves_are_stale_in_the_same_link() -> None:
    views = {
        name: ViewVersion("SELECT 1", table(20), tables=tables)
        for name, tables in {"v.of_a": (A,), "v.of_b": (B, C), "v.of_c": (C,)}.items()
    }
    after = moved(replace(head(a=table(1), c=table(3)), views=views), {A: B}, PLAIN).views
    states = {name: (v.table.state, v.table.as_of) for name, v in after.items() if v.table}
    assert states == {"v.of_a": (STALE, 1), "v.of_b": (STALE, 1), "v.of_c": (LIVE, 0)}


def test_14_the_place_of_a_table_that_has_left_is_taken_with_what_is_known_of_its_masks() -> None:
    gone = table(7, state=LEFT, masks=(ColumnMask("email", HASH),))
    link = head(a=table(1), b=gone)
    assert renamed(link, "shop", {B: 1}, PLAIN) == {A: B}
    after = moved(link, {A: B}, PLAIN)
    assert (after.tables[B].path, after.tables[B].had_masks) == ("tables/1", ((7, ("email",)),))


def test_14_no_file_is_an_orphan_because_its_table_had_another_name(tmp_path) -> None:
    """A takeover looks for what was not published, in links that have the tables under other names."""
    one, two = table(1, stage="5-t1-a1"), table(2, stage="6-t1-a1")
    stages = {5: ("1", "00000000000000000005-t1-a1"), 6: ("2", "00000000000000000006-t1-a1")}
    for path, stage in stages.values():
        folder = tmp_path / "tables" / path / "data"
        folder.mkdir(parents=True)
        (folder / f"{stage}.parquet").touch()
    one, two = (
        replace(t, stage=stage) for t, (_, stage) in zip((one, two), stages.values(), strict=True)
    )
    links = {5: {A: one, B: replace(two, stage="")}, 6: {A: two, B: one}, 7: {A: two, B: one}}
    remove_orphans(tmp_path, {A: two, B: one}, links, 2)
    assert len([*tmp_path.rglob("*.parquet")]) == 2
