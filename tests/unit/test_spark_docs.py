"""docs/spark.md names every option, column and extra that there is, and no other."""

import re
import tomllib
from pathlib import Path

from spark_consumers import snapshot_source, source
from spark_consumers.rows import _ABOUT, CHANGES_SCHEMA

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
    changes = section('The changes: `format("tuskline")`').split("`mode=changes`:")[0]
    assert sorted(named(changes)) == sorted(source.OPTIONS)
    snapshot = section('A table of a snapshot: `format("tuskline-snapshot")`')
    assert sorted(named(snapshot)) == sorted(snapshot_source.OPTIONS)


def test_the_columns_of_changes_are_those_of_the_code() -> None:
    text = section('The changes: `format("tuskline")`').split("`mode=changes`:")[1]
    assert named(text) == CHANGES_SCHEMA.names
    about = text.split("`mode=table` has")[1]
    assert set(_ABOUT.names) <= set(re.findall(r"`([^`]+)`", about))


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert named(section("Installing")) == list(project["optional-dependencies"])
