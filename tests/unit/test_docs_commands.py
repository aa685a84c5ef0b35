"""Commands and options that documents and hints name exist: `tuskline COMMAND --option`, in backquotes or on a line of a block."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from walsender_bridge.cli.app import app

ROOT = Path(__file__).parents[2]
_PACKAGES = [ROOT / name for name in ("walsender_bridge", "slot_sync", "spark_consumers")]
PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(path for folder in _PACKAGES for kind in ("*.md", "*.py") for path in folder.rglob(kind)),
    ]
)
_COMMAND = re.compile(r"`tuskline +([^`\n]+)`|^(?:\$ )?tuskline +([a-z][^`\n]+)$", re.MULTILINE)
_ROOT: Any = typer.main.get_command(app)


def unknown(text: str) -> Iterator[str]:
    """The commands and options of a text that `tuskline` does not have."""
    for quoted, line in _COMMAND.findall(text):
        if line.startswith("with "):  # prose that is wrapped before the output plugin of that name
            continue
        found, seen = _ROOT, ["tuskline"]
        for word in re.split(r"\s+#|&&|;", quoted or line)[0].split():
            names = {name for each in found.params for name in (*each.opts, *each.secondary_opts)}
            if re.match(r"--?[a-z]", word):
                if word.partition("=")[0] not in {*names, "-h", "--help"}:
                    yield f"{' '.join(seen)} {word}"
            elif hasattr(found, "commands"):
                yield from (
                    f"{' '.join(seen)} {name}"
                    for name in word.split("|")
                    if re.fullmatch(r"[a-z][a-z-]*", name) and name not in found.commands
                )
                if word.split("|")[0] not in found.commands:
                    break
                found = found.commands[word.split("|")[0]]
                seen.append(word)


def test_every_command_and_option_that_is_named_exists() -> None:
    texts = {page: page.read_text() for page in PAGES}
    assert not [(str(page), each) for page, text in texts.items() for each in unknown(text)]


def test_a_command_that_does_not_exist_is_noticed() -> None:
    text = "`tuskline failover`, `tuskline log verify --online`, `tuskline epochs list|hide`\ntuskline up --back  # here\n"
    assert [*unknown(text)] == [
        "tuskline failover",
        "tuskline log verify --online",
        "tuskline epochs hide",
        "tuskline up --back",
    ]
