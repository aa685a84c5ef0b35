"""`tuskline up` with `[slots]`: capture's own slot is kept on a candidate, seen in status, health and metrics."""

import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.attached import Attached, toml
from tests.support.extension import remove_built
from tests.support.servers import DEFAULT
from tests.support.slot_copies import PHYSICAL, rows, slot_names
from tests.support.slot_sync import STANDBY, SlotStack, slot_stack
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause

LEAST = (
    "CREATE ROLE keeper LOGIN REPLICATION PASSWORD 'x'",
    "GRANT tuskline_slots, pg_read_all_stats TO keeper",
)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[SlotStack]:
    with slot_stack(DEFAULT, tmp_path) as synced_pair:
        yield synced_pair
    remove_built()


def configured(synced_pair: SlotStack, folder: Path) -> Attached:
    """With metrics, and a role that may do no more than docs/slots.md says."""
    folder.mkdir()
    pair = synced_pair.pair
    pair.on_primary(*LEAST)
    pair.catch_up()
    made = Attached(folder, {"shop": {"dsn": pair.primary.dsn()}}, metrics=True)
    lines = ["[slots]", f"dsn = {toml(pair.primary.dsn(user='keeper', password='x'))}"]
    lines += ["poll = 0.2", f"[slots.candidates.{STANDBY}]"]
    lines += [f"dsn = {toml(pair.standby.dsn(user='keeper', password='x'))}"]
    lines += [f'slot = "{PHYSICAL}"', ""]
    with made.config.open("a") as file:
        file.write("\n".join(lines))
    return made


def fetch(tuskline: Attached, path: str) -> tuple[int, str]:
    try:
        url = f"http://{tuskline.metrics_listen}{path}"
        with urllib.request.urlopen(url, timeout=15) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""


def metric(text: str, name: str) -> dict[str, float]:
    """Samples of a family, by their labels."""
    found = re.findall(rf"^tuskline_{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in found}


def test_1_up_keeps_the_slot_of_capture_with_the_least_role(own: SlotStack, tmp_path: Path) -> None:
    pair = own.pair
    with configured(own, tmp_path / "here") as tuskline:
        tuskline.json("init")
        pair.catch_up()
        tuskline.up()
        own.folder = tmp_path / "here" / "log"

        def healthy() -> Any:
            own.load.write()
            pair.on_primary("CHECKPOINT")
            return fetch(tuskline, "/readyz")[0] == 200

        wait_for(healthy, 90, "the slot is kept, and all is well")
        assert slot_names(pair.standby) == {"tuskline_shop"}
        told = tuskline.json("status")["slot_copies"]
        assert [(each["slot"], each["state"]) for each in told["slots"]] == [
            ("tuskline_shop", "READY")
        ]
        assert tuskline.json("slots", "ready", "--standby", STANDBY)["ready"] is True
        text = fetch(tuskline, "/metrics")[1]
        assert metric(text, "slots_active") == {"": 1.0}
        assert metric(text, "slots_ready") == {f'standby="{STANDBY}"': 1.0}
        assert [*metric(text, "slot_copy_state").values()] == [1.0]
        # While up acts, another controller has no turn.
        error = tuskline.error("slots", "sync", "--once", "--timeout", "1", code=Cause.RUNNING)
        assert "another controller" in error["what"]
        pair.standby.stop()
        wait_for(lambda: fetch(tuskline, "/readyz")[0] == 503, 30, "the candidate is missed")
        assert "standby does not answer" in fetch(tuskline, "/readyz")[1]
        pair.standby.start()
        wait_for(healthy, 60, "all is well again")
        assert tuskline.stop_up() == 0
        locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
        wait_for(lambda: rows(pair.primary, locks) == [(0,)], 30, "its sessions have ended")
