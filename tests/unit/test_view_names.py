"""Every table gets a view of its own, whatever its name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from spark_consumers.lake.reader import Snapshot, view_names
from walsender_bridge.postgres.protocol.relation_name import relation_name


def test_names_are_those_of_schema_and_table():
    assert view_names(["shop.public.orders"]) == {"public_orders": "shop.public.orders"}
    assert view_names(["shop.public.orders"], "now") == {"now_public_orders": "shop.public.orders"}
    several = view_names(["shop.public.orders", "bank.public.moves"])
    assert several == {
        "shop_public_orders": "shop.public.orders",
        "bank_public_moves": "bank.public.moves",
    }


def test_names_that_are_one_to_spark_get_a_mark():
    tables = ["s.public.Orders", "s.public.orders", "s.a.b_c", "s.a_b.c", "s.public.moves"]
    found = view_names(tables)
    assert sorted(found.values()) == sorted(tables)
    assert len({view.casefold() for view in found}) == 5
    assert found["public_moves"] == "s.public.moves"
    assert view_names([*tables, "s.public.more"]).items() >= found.items(), "they stay as they are"


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=3)


@given(st.sets(st.tuples(st.sampled_from(["s", "t"]), NAMES, NAMES), max_size=8))
def test_no_view_takes_anothers_place(tables):
    full = {f"{stream}.{relation_name(schema, name)}" for stream, schema, name in tables}
    found = view_names(full)
    assert sorted(found.values()) == sorted(full)
    assert len({view.casefold() for view in found}) == len(full)


class FakeSpark:
    """A session's temporary views, without regard to case as in Spark."""

    def __init__(self):
        self.views: dict[str, int] = {}
        self.catalog = SimpleNamespace(
            dropTempView=lambda view: self.views.pop(view.casefold(), None)
        )

    def frame(self, epoch):
        def make(quoted):
            self.views[quoted.strip("`").casefold()] = epoch

        return SimpleNamespace(createOrReplaceTempView=make)


def test_views_of_an_earlier_snapshot_do_not_stay_beside_those_of_a_later_one(monkeypatch):
    spark: Any = FakeSpark()
    monkeypatch.setattr(Snapshot, "__getitem__", lambda self, _: spark.frame(self.epoch))
    shown = [
        ["shop.public.orders", "shop.public.bag"],
        # `orders` gets another name, as another table has that name to Spark.
        ["shop.public.orders", "shop.public.Orders", "shop.public.bag"],
        # Every name gets its stream.
        ["shop.public.orders", "bank.public.moves"],
        ["shop.public.ORDERS"],
    ]
    for epoch, tables in enumerate(shown):
        link: Any = SimpleNamespace(
            readable=dict.fromkeys(tables), epoch=epoch, readable_views={}, at_sources={}
        )
        made = Snapshot(spark, Path("/lake"), link, allow_stale=True).register_views("now")
        assert spark.views == {view.casefold(): epoch for view in made}
        assert sorted(made.values()) == sorted(tables)
