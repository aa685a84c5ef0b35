"""docs/slots.md has each state and each reason of the resolver, once, and no other."""

import re
from enum import StrEnum
from pathlib import Path

import pytest

from slot_sync.resolver.transitions import CopyState, Reason

PAGE = Path(__file__).parents[2] / "docs" / "slots.md"
_ROW = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)


@pytest.mark.parametrize(("heading", "words"), [("States", CopyState), ("Reasons", Reason)])
def test_the_table_is_complete(heading: str, words: type[StrEnum]) -> None:
    (section,) = re.findall(
        rf"^## {heading}\n(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    assert sorted(_ROW.findall(section)) == sorted(words)
