"""Every table gets a view of its own, whatever its name."""

from hypothesis import given
from hypothesis import strategies as st

from spark_consumers.reader import view_names
from walsender_bridge.wire.relation_name import relation_name


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
