"""docs/spark.md names every public name, option, column and extra that there is, and no other."""

import re
import tomllib
from pathlib import Path

import tuskline
from spark_consumers.sources import changes
from spark_consumers.sources import snapshot as snapshot_source
from spark_consumers.sources.rows import _ABOUT, CHANGES_SCHEMA

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "spark.md").read_text()


def section(title: str) -> str:
    """The text below a heading, up to the next."""
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]


def named(text: str) -> list[str]:
    """What stands in code in the first column of the tables."""
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_the_options_of_both_formats_are_those_of_the_code() -> None:
    text = section('The changes: `format("tuskline")`').split("`mode=changes`:")[0]
    assert sorted(named(text)) == sorted(changes.OPTIONS)
    text = section('A table of a snapshot: `format("tuskline-snapshot")`')
    assert sorted(named(text)) == sorted(snapshot_source.OPTIONS)


def test_the_columns_of_changes_are_those_of_the_code() -> None:
    text = section('The changes: `format("tuskline")`').split("`mode=changes`:")[1]
    assert named(text) == CHANGES_SCHEMA.names
    about = text.split("`mode=table` has")[1]
    assert set(_ABOUT.names) <= set(re.findall(r"`([^`]+)`", about))


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert named(section("Installing")) == list(project["optional-dependencies"])


def test_the_names_to_import_are_those_of_the_package() -> None:
    rows = section("The names to import").splitlines()
    table = [line.split("|") for line in rows if line.startswith("| `")]
    assert sorted(named(section("The names to import"))) == sorted(tuskline.__all__)
    extras = {name: row[3].strip(" `") for row in table for name in re.findall(r"`(\w+)`", row[1])}
    assert {name: extra for name, extra in extras.items() if extra} == tuskline._EXTRAS
