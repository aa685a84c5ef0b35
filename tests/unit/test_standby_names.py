"""Who has to answer before a COMMIT returns, and whether anybody can answer in the proposer's place."""

import pytest

from walsender_bridge.errors import MalformedMessageError
from walsender_bridge.postgres.standby_names import StandbyNames

OURS = "tuskline_quorum"


@pytest.mark.parametrize(
    ("text", "method", "number", "names"),
    [
        ("", "FIRST", 0, ()),
        ("s1", "FIRST", 1, ("s1",)),
        ("s1, s2", "FIRST", 1, ("s1", "s2")),
        ("2 (s1, s2, s3)", "FIRST", 2, ("s1", "s2", "s3")),
        ("first 2 (s1,s2)", "FIRST", 2, ("s1", "s2")),
        ('ANY 1 (s1, "S ""2"", (x)")', "ANY", 1, ("s1", 'S "2", (x)')),
        ("*", "FIRST", 1, ("*",)),
        ("  ANY 2 ( * , a-b )  ", "ANY", 2, ("*", "a-b")),
    ],
)
def test_values_are_read_as_the_server_reads_them(text, method, number, names):
    found = StandbyNames.parse(text)
    assert (found.method, found.number, found.names) == (method, number, names)
    assert StandbyNames.parse(str(found)) == found


@pytest.mark.parametrize("text", ["FIRST (a)", "a b", "a,", ",", "ANY x (a)", 'FIRST 1 ("a)', "()"])
def test_what_the_server_would_not_take_is_refused(text):
    with pytest.raises(MalformedMessageError):
        StandbyNames.parse(text)


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("", False),
        (OURS, True),
        (OURS.upper(), True),
        (f"FIRST 1 ({OURS})", True),
        (f"FIRST 2 ({OURS}, s1)", True),
        # Two walsenders of s1 are enough.
        (f"ANY 2 ({OURS}, s1)", False),
        (f"FIRST 2 (s1, {OURS})", False),
        # In its place, or beside it, somebody else can answer.
        (f"{OURS}, s1", False),
        (f"FIRST 1 ({OURS}, s1)", False),
        (f"ANY 1 ({OURS}, s1)", False),
        (f"ANY 2 ({OURS}, s1, s2)", False),
        ("*", False),
        (f"FIRST 2 ({OURS}, *)", False),
        ("FIRST 1 (s1)", False),
        # More than there are: nobody ever gets an answer.
        (f"FIRST 2 ({OURS})", False),
    ],
)
def test_28_the_proposer_cannot_be_outvoted(text, needs):
    assert StandbyNames.parse(text).needs(OURS) is needs


@pytest.mark.parametrize(
    ("before", "joined"),
    [
        ("", f"ANY 1 ({OURS})"),
        (OURS, f"ANY 1 ({OURS})"),
        ("s1", f"FIRST 2 ({OURS}, s1)"),
        ("ANY 2 (s1, s2)", f"FIRST 3 ({OURS}, s1, s2)"),
        (f"ANY 2 (s1, {OURS.upper()})", f'FIRST 2 ("{OURS.upper()}", s1)'),
        (f"FIRST 2 (s1, {OURS})", f"FIRST 2 ({OURS}, s1)"),
        ("FIRST 1 (s1, s2)", None),
        ("*", None),
        (f"ANY 1 ({OURS}, s1)", None),
    ],
)
def test_the_proposer_joins_who_is_there_already(before, joined):
    found = StandbyNames.parse(before).joined_by(OURS)
    assert (None if found is None else str(found)) == joined


@pytest.mark.parametrize(
    ("before", "left"),
    [
        (f"FIRST 1 ({OURS})", ""),
        (f"FIRST 2 ({OURS.upper()}, s1)", "FIRST 1 (s1)"),
        (f"ANY 2 (s1, {OURS}, s2)", "ANY 2 (s1, s2)"),
        (f"ANY 3 (s1, {OURS}, s2)", "ANY 2 (s1, s2)"),
        ("*", ""),
    ],
)
def test_whoever_else_has_to_answer_still_has_to_when_the_proposer_leaves(before, left):
    assert str(StandbyNames.parse(before).left_by(OURS)) == left
