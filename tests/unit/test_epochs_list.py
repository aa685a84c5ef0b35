"""`tuskline epochs list`: a line for each epoch, the newest last, in a time that does not depend on how many there are."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spark_consumers.lake.manifest.chain import Chain, Manifest, open_chain
from spark_consumers.lake.manifest.pin import PINNED, Pin
from spark_consumers.lake.manifest.pinned_links import PinnedLinks
from walsender_bridge.cli.app import app


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    (tmp_path / "tuskline.toml").write_text(
        f"""
[log]
data_dir = "{tmp_path}/log"
[[log_server]]
data_dir = "{tmp_path}/log-server"
listen = "127.0.0.1:7401"
[[source]]
name = "shop"
dsn = "service=shop"
[lake]
uri = "{tmp_path}/lake"
"""
    )
    made = open_chain(tmp_path / "lake")
    made.initialise("log", "iceberg")
    return made


def grow(chain: Chain, epochs: list[int], head: Manifest | None = None) -> Manifest:
    """A link for each; one of the epoch before it changes the state of a table, or so."""
    for number in epochs:
        if head is None:
            link = Manifest("lake", 1, number, 0, 1, 0.0, changes=number)
        else:
            changes = number if number > head.epoch else 0
            link = head.next(head.steady_at + 1, epoch=number, changes=changes)
        chain.publish(link, head)
        head = link
    assert head is not None
    return head


def listed(chain: Chain, *words: str) -> tuple[list[dict[str, Any]], str]:
    """The epochs, as JSON; and what is said beside them as text."""
    config = str(chain.root.parent / "tuskline.toml")
    found = CliRunner().invoke(app, ["epochs", "list", "-c", config, *words, "--json"])
    assert found.exit_code == 0, found.output
    text = CliRunner().invoke(app, ["epochs", "list", "-c", config, *words])
    return json.loads(found.stdout)["epochs"], text.stderr


def numbers(chain: Chain, *words: str) -> list[int]:
    return [each["epoch"] for each in listed(chain, *words)[0]]


def test_an_epoch_has_one_line_however_many_links_it_has(chain: Chain) -> None:
    grow(chain, [10, 20, 20, 20, 30, 30])
    found, _ = listed(chain)
    assert [(each["epoch"], each["link"], each["changes"]) for each in found] == [
        (10, 1, 10),
        (20, 4, 20),
        (30, 6, 30),
    ]


def test_epochs_are_listed_page_by_page(chain: Chain) -> None:
    grow(chain, [number for number in range(1, 51) for _ in range(2)])
    assert numbers(chain) == list(range(31, 51))
    found, said = listed(chain, "--limit", "3")
    assert [each["epoch"] for each in found] == [48, 49, 50]
    assert "--before 48, or --all" in said
    assert numbers(chain, "--limit", "3", "--before", "48") == [45, 46, 47]
    found, said = listed(chain, "--before", "4")
    assert [each["epoch"] for each in found] == [1, 2, 3]
    assert said == ""
    assert numbers(chain, "--all") == list(range(1, 51))


def test_older_epochs_that_are_pinned_are_listed_too(chain: Chain) -> None:
    head = grow(chain, [1])
    record = PinnedLinks(chain.store).keep(head, 1)
    pin = Pin(epoch=1, link=1, record=record, state=PINNED, at=0.0)
    pinned = replace(head.next(1.0), pins={"close": pin})
    chain.publish(pinned, head)
    grow(chain, list(range(2, 40)), pinned)
    found, said = listed(chain, "--limit", "2")
    assert [(each["epoch"], each["pins"]) for each in found] == [
        (1, ["close"]),
        (38, []),
        (39, []),
    ]
    assert "--before 38" in said


def test_a_list_reads_as_many_links_as_it_shows(
    chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    grow(chain, list(range(1, 200)))
    read: list[int] = []
    record = Chain._record

    def counted(self: Chain, link: int) -> dict[str, Any] | None:
        read.append(link)
        return record(self, link)

    monkeypatch.setattr(Chain, "_record", counted)
    monkeypatch.setattr(Chain, "numbers", None)
    found = CliRunner().invoke(
        app, ["epochs", "list", "-c", str(chain.root.parent / "tuskline.toml")]
    )
    assert found.exit_code == 0, found.output
    assert min(read) >= 199 - 21
