"""A relation's name as one text, and its printable form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from walsender_bridge.postgres.protocol.relation_name import relation_name, split_relation
from walsender_bridge.provisioning.fixes import comment, fix, relation
from walsender_bridge.runtime.printable import printable

names = st.text(min_size=1, max_size=8)


@given(names, names)
def test_each_pair_of_names_has_one_text_and_each_text_one_pair(schema, table):
    assert split_relation(relation_name(schema, table)) == (schema, table)


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("public.orders", ("public", "orders")),
        ("public.a.b", ("public", "a.b")),
        ('"a.b".c', ("a.b", "c")),
        ('"a""b".c.d', ('a"b', "c.d")),
        ('"unfinished.c', ('"unfinished', "c")),
        ("orders", ("orders", "")),
    ],
)
def test_a_name_is_split_as_it_is_written(text, pair):
    assert split_relation(text) == pair


@given(st.text(max_size=12))
def test_a_comment_has_one_line_and_nothing_a_terminal_obeys(text):
    assert comment(text).isprintable()
    assert printable(text, lines=True).replace("\n", "").replace("\t", "").isprintable()


@given(names, names)
def test_a_statement_of_the_script_is_printable_whatever_the_names(schema, table):
    text = fix("fix/identity", table=relation_name(schema, table))
    assert text.isprintable()
    assert text == f"ALTER TABLE {relation(relation_name(schema, table))} REPLICA IDENTITY FULL;"
