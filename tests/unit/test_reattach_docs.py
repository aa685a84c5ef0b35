"""What docs/reattach.md says that `status` says is said somewhere."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PRODUCT = ("walsender_bridge", "slot_sync", "spark_consumers")
_ROW = re.compile(r"^\| (?!what happened|---)[^|]+ \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)


def _said() -> list[str]:
    return _ROW.findall((ROOT / "docs" / "reattach.md").read_text())


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Every text of the product's code, each value in it as `...`."""
    found = []
    for package in _PRODUCT:
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = (p.value if isinstance(p, ast.Constant) else "..." for p in node.values)
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def test_the_table_has_its_rows() -> None:
    assert len(_said()) == 9


@pytest.mark.parametrize("said", _said())
def test_each_text_of_the_table_is_said(said: str, texts: list[str]) -> None:
    for text in re.split(r"; or: | \(", said.removesuffix(")")):
        parts = [re.escape(part.strip()) for part in text.removesuffix("...").split("...")]
        pattern = re.compile(r".*?\.\.\..*?".join(parts), re.DOTALL)
        assert any(pattern.search(each) for each in texts), text
