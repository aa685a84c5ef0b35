"""Under which names tables are in the lake (`postgres.target_name`, `tables.target_names`)."""

from dataclasses import replace
from itertools import product

import pytest

from spark_consumers.lake.manifest.chain import Manifest, StreamPosition
from spark_consumers.lake.manifest.feed_version import FeedVersion
from spark_consumers.lake.manifest.table_version import TableVersion
from spark_consumers.lake.manifest.view_version import ViewVersion
from spark_consumers.lake.tables.renamed import Naming, moved
from spark_consumers.lake.tables.target_names import (
    Given,
    given,
    names_in,
    others_in,
    pending,
    with_names,
)
from walsender_bridge.postgres.table_layout import LayoutRule, TableLayout, feed_of, target_of
from walsender_bridge.postgres.table_patterns import Pattern
from walsender_bridge.postgres.target_name import parse_name, target_name

A, B, C = (f"shop.public.{name}" for name in "abc")


def table(path: str, lake_name: str = "") -> TableVersion:
    return TableVersion(path, "iceberg", 1, "", ("id",), (), 0, 0, 0, 1, lake_name=lake_name)


def head(**tables: TableVersion) -> Manifest:
    named = {f"shop.public.{name}": each for name, each in tables.items()}
    streams = {"shop": StreamPosition(1, 1, 0, 0)}
    return Manifest("lake", 1, 1, 0, 1, 0.0, streams=streams, tables=named)


@pytest.mark.parametrize(
    ("pattern", "template", "name", "expected"),
    [
        ("public.orders", "sales.orders", "shop.public.orders", "shop.sales.orders"),
        # Without a schema it stays.
        ("public.orders", "Orders_2", "shop.public.orders", "shop.public.Orders_2"),
        ("public.*", "sales.{table}", 'shop.public.Odd "name".x', 'shop.sales.Odd "name".x'),
        ("*.*", "{schema}_copy.t_{table}", "shop.app.a", "shop.app_copy.t_a"),
        # A schema with a dot, and names that contain what stands for the other one.
        ('"a.b".*', "{schema}.{table}_x", 'shop."a.b".c', 'shop."a.b".c_x'),
        ("*.*", "x_{schema}.{table}", "s.{table}.{schema}", "s.x_{table}.{schema}"),
    ],
)  # fmt: skip
def test_a_target_name_is_a_template(pattern, template, name, expected) -> None:
    rule = LayoutRule(
        Pattern.parse(pattern), TableLayout(), name=parse_name(template, Pattern.parse(pattern))
    )
    assert rule.matches(name)
    assert target_of([rule], name) == expected
    assert target_name(rule.name, name) == expected


@pytest.mark.parametrize(
    ("pattern", "template", "message"),
    [
        ("public.a", "sales.", "is not a name of tables in the lake"),
        ("public.a", ".a", "is not a name"),
        ("public.a", "a.b.c", "is not a name"),
        ("public.a", "Sales Orders", "is not a name"),
        ("public.a", "{schema}.{column}", "is not a name"),
        ("public.a", "s.{table}{table}", "is not a name"),
        ("public.*", "sales.orders", r"matches several tables: write \{table\} in it"),
        ("public.a*", "orders", r"matches several tables"),
        ("public.a", "s." + "x" * 64, "is too long: write at most 63"),
        ("public.a", "x" * 31 + "{schema}.a", "or 30 around a placeholder"),
        ("*.orders", "sales.orders", r"matches several schemas: write \{schema\} in it"),
    ],
)
def test_a_target_name_that_no_table_can_have_is_refused(pattern, template, message) -> None:
    with pytest.raises(ValueError, match=message):
        parse_name(template, Pattern.parse(pattern))


def test_a_feed_is_beside_its_table() -> None:
    rule = LayoutRule(
        Pattern.parse("public.a"), TableLayout(), feed="{table}_changes", name="sales.b"
    )
    assert feed_of([rule], A) == "shop.sales.b_changes"
    # While the table does not have its target name, so does its feed not.
    assert feed_of([rule], A, A) == "shop.public.a_changes"
    assert feed_of([rule], B) == ""


NAMES = ("x", "y", "z")


def test_no_two_tables_have_one_name_and_none_loses_its_own() -> None:
    """All cases of three tables, each new or with a name, that want names; with the name of a view."""
    several = 0
    for had in product((*NAMES, None), repeat=3):
        shown = [name for name in had if name is not None]
        if len({*shown}) < len(shown):
            continue
        before = {table: name for table, name in zip("abc", had, strict=True) if name is not None}
        for wants in product((*NAMES, "v"), repeat=3):
            wanted = dict(zip("abc", wants, strict=True))
            made = given(wanted, before, {"v": "view v"})
            assert len({*made.names.values()}) == len(made.names)
            assert "v" not in made.names.values()
            for name in "abc":
                if name in made.refused:
                    # It stays as it was, and the reason says so.
                    assert made.names.get(name) == before.get(name)
                    kept = f"it keeps the name {before[name]}" if name in before else "not copied"
                    assert kept in made.refused[name]
                    assert "[[lake.tables]]" in made.refused[name]
                else:
                    assert made.names[name] == wanted[name]
            # What can be given is: nobody is refused but for a name that another one has, or wants.
            if len({*wants}) == 3 and "v" not in wants:
                assert not made.refused
            several += len(made.refused) > 1
            # Where nothing is refused, it is settled.
            assert given(made.names, made.names, {}) == Given(made.names, {})
    assert several > 100


def test_a_table_whose_name_is_the_sources_may_take_that_of_a_view() -> None:
    """As before there were target names: the view gives way, and says so."""
    assert given({A: A}, {}, {A: "view a"}).names == {A: A}
    assert given({B: A}, {}, {A: "view a"}).refused == {
        B: f"it is not copied: {A} is the name of view a. Give one of them another name in [[lake.tables]] and start lake run again"
    }


def test_names_go_to_tables_copies_and_feeds_with_one_head() -> None:
    feeds = {f"{name}_log": FeedVersion(name, "p", table("f")) for name in (A, B)}
    link = replace(head(a=table("1"), b=table("2")), feeds=feeds, copies={A: table("3")})

    def feed(_name: str, lake_name: str) -> str:
        return f"{lake_name}_log"

    swap = Given({A: B, B: A}, {})
    assert pending(link, swap) == {A: B, B: A}
    after = with_names(link, swap, feed)
    assert names_in(after) == {A: B, B: A}
    assert after.copies[A].lake_name == B
    assert {full: each.of for full, each in after.feeds.items()} == {f"{A}_log": B, f"{B}_log": A}
    assert {name: each.path for name, each in after.readable.items()} == {
        A: "2", B: "1", f"{A}_log": "f", f"{B}_log": "f",
    }  # fmt: skip
    assert pending(after, swap) == {}
    # The same head where nothing is new, for what is written is swept for remains.
    again = with_names(after, swap, feed)
    assert all(again.tables[name] is after.tables[name] for name in (A, B))
    back = with_names(after, Given({A: A, B: B}, {}), feed)
    assert (back.tables, back.feeds) == (link.tables, link.feeds)


def test_the_feed_of_a_renamed_table_stays_with_the_name_that_the_table_keeps() -> None:
    """Its target name is another table's: its feed would begin again under a name that only `moved` knew."""
    d = "shop.public.d"
    kept = FeedVersion(A, "p", table("f"))
    link = replace(head(a=replace(table("1"), lake_name=d), c=table("3")), feeds={f"{d}_log": kept})

    def feed(_name: str, lake_name: str) -> str:
        return f"{lake_name}_log"

    at_source = moved(link, {A: B}, Naming(lambda _: None, lambda _: f"{C}_log"))
    names = given({B: C}, {B: d, C: C}, {})
    assert names.refused
    after = with_names(at_source, names, feed, [B])
    assert names_in(after) == {B: d, C: C}
    assert after.feeds == {f"{d}_log": replace(kept, of=B)}


def test_a_copy_that_is_refused_is_not_shown() -> None:
    link = replace(head(a=table("1")), copies={B: table("2"), C: table("3")})
    made = given({B: A, C: C}, {A: A}, {})
    after = with_names(link, made, lambda *_: "")
    assert {*after.copies} == {C}
    assert {*after.tables} == {A}


def test_a_view_is_hidden_by_names_in_the_lake_alone() -> None:
    """Files of a view that nothing shows would be removed."""
    view = ViewVersion("SELECT 1", table("v"), tables=(A,))
    link = replace(head(a=table("1", "shop.sales.a")), views={"public.a": view})
    assert {name: each.path for name, each in link.readable.items()} == {
        A: "v",
        "shop.sales.a": "1",
    }
    assert [*link.readable_views] == [A]
    assert others_in(link) == {A: "view public.a"}
    shown = replace(link, tables={B: table("1", A)})
    assert {name: each.path for name, each in shown.readable.items()} == {A: "1"}
    assert shown.at_sources == {A: B}
