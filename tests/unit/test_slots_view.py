"""What is said of the copies of slots: nothing that is old, and a row for each in `top` and `status`."""

import asyncio
import time
from pathlib import Path
from typing import Any, Self

import pytest
import typer
from textual.widgets import Static

from slot_sync.status_record import SlotsStatus
from tests.support import statuses
from walsender_bridge.cli import status, top
from walsender_bridge.config import Config, load_config
from walsender_bridge.observability import observation, slots_view
from walsender_bridge.observability.observation import Observation
from walsender_bridge.observability.slots_view import SlotsView
from walsender_bridge.runtime import json_model

TOML = """
[log]
data_dir = "log"

[[log_server]]
listen = "127.0.0.1:1"
data_dir = "log-server"

[[source]]
name = "shop"
dsn = "host=127.0.0.1 port=1 dbname=x connect_timeout=1"

[slots.candidates.near]
dsn = "host=127.0.0.1 port=1 dbname=x connect_timeout=1"
slot = "near"
"""


COPIES = (
    statuses.slot_copy(),
    statuses.slot_copy(
        slot="other", state="SUSPECT", safe=False, reason="not_heard", age=None, lag_bytes=None
    ),
)
LINES = [
    "slot   candidate  verdict  lag     proven     reason",
    "app    near       READY    4.0 kB  1.3 s ago  proven",
    "other  near       SUSPECT  -       -          not_heard",
]


def told(**other: Any) -> SlotsStatus:
    return statuses.slots(slots=COPIES, **other)


@pytest.fixture
def settings(tmp_path: Path) -> Config:
    path = tmp_path / "tuskline.toml"
    path.write_text(TOML)
    path.chmod(0o600)
    return load_config(path)


def test_a_row_tells_of_each_copy() -> None:
    first, second = SlotsView(told()).rows
    assert first == {
        "slot": "app",
        "candidate": "near",
        "verdict": "READY",
        "reason": "proven",
        "age": 1.26,
        "lag_bytes": 4096,
    }
    assert (second["verdict"], second["age"]) == ("SUSPECT", None)
    assert SlotsView(None).rows == []


@pytest.mark.parametrize("old", [{"updated_at": time.time() - 60}, {"pid": 0}])
def test_what_is_old_says_nothing_of_now(settings: Config, old: dict[str, Any]) -> None:
    settings.slots_status.parent.mkdir(parents=True)
    settings.slots_status.write_bytes(json_model.encode(told()))
    seen = slots_view.observe(settings)
    assert seen is not None
    assert len(seen.rows) == 2
    settings.slots_status.write_bytes(json_model.encode(told(**old)))
    seen = slots_view.observe(settings)
    assert seen is not None
    assert seen.rows == []
    assert "does not report" in seen.problems[0]


class _Observer:
    """Sees what it is given."""

    seen: SlotsView | None = None

    def __init__(self, settings: Config) -> None:
        del settings

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def observe(self) -> Observation:
        return Observation(time.time(), None, [], [], None, None, slots=self.seen)


async def _shown(settings: Config) -> list[str]:
    app = top.Top(settings, every=0.05)
    async with app.run_test(size=(140, 60)) as pilot:
        deadline = time.monotonic() + 60
        while (text := str(app.query_one("#seen", Static).content)).startswith("waiting"):
            assert time.monotonic() < deadline, "nothing is shown"
            await pilot.pause(0.02)
        await pilot.press("q")
    return text.splitlines()


@pytest.mark.parametrize(
    ("seen", "lines"), [(SlotsView(told()), LINES), (SlotsView(None), []), (None, [])]
)
def test_top_shows_the_slots_that_are_known(
    settings: Config, monkeypatch: pytest.MonkeyPatch, seen: SlotsView | None, lines: list[str]
) -> None:
    monkeypatch.setattr(_Observer, "seen", seen)
    monkeypatch.setattr(top, "Observer", _Observer)
    found = asyncio.run(_shown(settings))
    assert [line for line in found if line.startswith(("slot ", "app ", "other "))] == lines


def test_status_has_it_too(
    settings: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(_Observer, "seen", SlotsView(told()))
    monkeypatch.setattr(observation, "Observer", _Observer)
    with pytest.raises(typer.Exit):
        status.status(tmp_path / "tuskline.toml")
    shown = capsys.readouterr().out
    for word in ("app", "near", "READY", "SUSPECT", "not_heard", "4096"):
        assert word in shown
