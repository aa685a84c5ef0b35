"""What the entries of `tables` mean."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walsender_bridge.postgres.table_patterns import Choice, Pattern, entry_for

names = st.text(st.characters(exclude_characters="\0"), min_size=1, max_size=6)


@given(names, names, names)
def test_each_table_has_an_entry_that_names_it_alone(schema: str, table: str, other: str) -> None:
    pattern = Pattern.parse(entry_for(schema, table))
    assert pattern.exact == (schema, table)
    assert not pattern.excludes
    assert pattern.matches(schema, table)
    assert pattern.matches(schema, other) == (other == table)
    assert pattern.matches(other, table) == (other == schema)


@pytest.mark.parametrize(
    ("entry", "matched", "not_matched"),
    [
        ("public.*", [("public", "a"), ("public", "a.b")], [("Public", "a"), ("publics", "a")]),
        ("sales.order_*", [("sales", "order_"), ("sales", "order_1")], [("sales", "orders")]),
        ("*.orders", [("a", "orders"), ("a.b", "orders")], [("a", "Orders")]),
        ("public.a*c*e", [("public", "ace"), ("public", "abcde\n.e")], [("public", "acd")]),
        ("!public.audit_*", [("public", "audit_x")], [("public", "audit")]),
        ('"a.b".*', [("a.b", "c")], [("a", "b.c")]),
        ("a.b.c", [("a", "b.c")], [("a.b", "c")]),
        ('public."x*"', [("public", "x*")], [("public", "xy"), ("public", '"x*"')]),
        ('public."say ""it"""', [("public", 'say "it"')], []),
        ('public.say "it"', [("public", 'say "it"')], []),
        ('"!odd".t', [("!odd", "t")], [("odd", "t")]),
        (r"public.a[bc]+\d", [("public", r"a[bc]+\d")], [("public", "ab1")]),
    ],
)
def test_a_pattern_matches_whole_names(
    entry: str, matched: list[tuple[str, str]], not_matched: list[tuple[str, str]]
) -> None:
    pattern = Pattern.parse(entry)
    assert [pattern.matches(*name) for name in matched] == [True] * len(matched)
    assert [pattern.matches(*name) for name in not_matched] == [False] * len(not_matched)


@pytest.mark.parametrize("entry", ["orders", "*", "!", "", ".orders", "public.", "!orders_*"])
def test_an_entry_that_names_no_table_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="is not a table pattern"):
        Choice.of([entry])


@pytest.mark.parametrize(
    ("entries", "means", "not_means"),
    [
        ([], ["public.a"], []),
        (["!public.a*"], ["public.b", "s.a"], ["public.a", "public.ab"]),
        (["public.*", "!public.a*"], ["public.b"], ["public.a", "s.b"]),
        # An exclusion counts wherever it stands, also against a name.
        (["!public.a*", "public.ab", "public.b"], ["public.b"], ["public.ab"]),
    ],
)
def test_what_is_excluded_is_not_meant(
    entries: list[str], means: list[str], not_means: list[str]
) -> None:
    choice = Choice.of(entries)
    assert all(choice.means(*name.split(".")) for name in means)
    assert not any(choice.means(*name.split(".")) for name in not_means)


def test_a_choice_of_names_alone_is_not_followed() -> None:
    assert not Choice.of(["public.a", "!public.b*"]).follows
    assert Choice.of(["public.a", "public.b*"]).follows
    assert Choice.of(["!public.b*"]).follows
    assert Choice.of([]).is_default
    assert Choice.of(["public.a", "public.a", "!public.b"]).named == [("public", "a")]
