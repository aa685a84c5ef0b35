"""The documents agree with the tree: links lead somewhere, files that are named exist, a term is explained once."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.support.quorum.mutants import MUTANTS
from tests.support.table_format import NUMBERS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not {".venv", ".git", "node_modules"} & set(path.relative_to(ROOT).parts)
)
#: The documents that say where something is decided.
NAMING = [DOCS / "glossary.md", DOCS / "invariants.md", *(DOCS / "decisions").glob("*.md")]
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
_NAMED = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|sql|md|c|h|sh))`")
_TEST = re.compile(r"`(tests/[a-z_/]+\.py)::(test_[a-z0-9_]+)`")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", page.read_text()), re.MULTILINE)
    words = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {text.replace(" ", "-") for text in words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for name, anchor in _LINK.findall(page.read_text()):
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{name}: no such file"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name}#{anchor}: no such heading"


@pytest.mark.parametrize("page", NAMING, ids=lambda page: page.name)
def test_every_file_that_is_named_exists(page: Path) -> None:
    missing = [name for name in _NAMED.findall(page.read_text()) if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", NAMING, ids=lambda page: page.name)
def test_every_test_that_is_named_exists(page: Path) -> None:
    for file, name in _TEST.findall(page.read_text()):
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


def test_the_glossary_explains_each_term_once() -> None:
    text = (DOCS / "glossary.md").read_text()
    rows = re.findall(r"^\| (\*\*.*?) \|", text, re.MULTILINE)
    terms = Counter(term for row in rows for term in re.findall(r"\*\*(.+?)\*\*", row))
    assert len(terms) > 100
    assert [term for term, times in terms.items() if times > 1] == []


def test_every_reference_of_the_glossary_has_an_address() -> None:
    text = (DOCS / "glossary.md").read_text()
    used = set(re.findall(r"\]\[([\w-]+)\]", text))
    assert used == set(re.findall(r"^\[([\w-]+)\]: https://", text, re.MULTILINE))


def test_every_number_of_a_test_is_a_behavior_that_is_stated() -> None:
    text = (DOCS / "invariants.md").read_text().split("\n## Behaviors by number\n")[1]
    cells = re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE)
    stated = {number for cell in cells for number in cell.split(", ")}
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    names = [name for text in tests for name in re.findall(r"def test_((?:\d+_)+)", text)]
    used = {number for name in names for number in name.strip("_").split("_")}
    assert used <= stated


def test_28_each_file_that_runs_by_delta_is_in_the_table_of_them() -> None:
    table = (DOCS / "invariants.md").read_text().split("\n**By Delta** (28).")[1]
    found = {path for path in (ROOT / "tests" / "spark").glob("test_*.py") if runs_by_delta(path)}
    assert len(found) > 20
    unnamed = {path.name for path in found if f"`tests/spark/{path.name}`" not in table}
    assert not unnamed


def runs_by_delta(path: Path) -> bool:
    """Whether `--delta` runs a test of this file a second time, as `table_format.runs_by_both` decides."""
    body = ast.parse(path.read_text()).body
    marks = [ast.unparse(node) for node in body if isinstance(node, ast.Assign)]
    if any(mark.startswith("pytestmark") and "iceberg_only" in mark for mark in marks):
        return False
    tests = [node for node in body if isinstance(node, ast.FunctionDef)]
    wanted = [
        test
        for test in tests
        if not any("iceberg_only" in ast.unparse(mark) for mark in test.decorator_list)
    ]
    names = [re.match(r"test_((?:\d+_)+)", test.name) for test in wanted]
    numbers = {int(each) for name in names if name for each in name[1].strip("_").split("_")}
    return not NUMBERS.isdisjoint(numbers)


def test_the_mutants_that_the_rules_name_exist() -> None:
    rules = {name.partition(":")[0] for name in MUTANTS if name[0].isdigit()}
    text = (DOCS / "invariants.md").read_text()
    assert rules == set(re.findall(r"^\| (\d+) \| `walsender_bridge/quorum", text, re.MULTILINE))
    named = re.findall(r"^\| \d+ \| `walsender_bridge/quorum.*\| (.*) \|$", text, re.MULTILINE)
    for name in (each for cell in named for each in cell.split("; ") if ", from " not in cell):
        assert any(mutant.endswith(": " + name) for mutant in MUTANTS), name


def test_every_decision_has_a_status_and_is_in_the_index() -> None:
    index = (DOCS / "decisions" / "README.md").read_text()
    for page in (DOCS / "decisions").glob("*.md"):
        if page.name != "README.md":
            status = re.search(
                r"^Status: (accepted|proposed|superseded by .*)\. Date: (2\d{3}-\d\d-\d\d)",
                page.read_text(),
                re.MULTILINE,
            )
            assert status, f"{page.name}: no status"
            assert f"]({page.name}) | {status[1]} | {status[2]} |" in index, page.name
