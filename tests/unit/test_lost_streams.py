"""What is said of a stream that cannot go on, from facts alone: its publication, its slot, and what is known of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from walsender_bridge.capture.publication import publication_mismatch
from walsender_bridge.capture.source import CaptureSource, LogPosition, cannot_continue, lost
from walsender_bridge.capture.status import StatusFile
from walsender_bridge.capture.status_record import CaptureStatus
from walsender_bridge.capture.stream_record import KnownPosition, of_status
from walsender_bridge.cli.doctor import of_capture
from walsender_bridge.config import load_config
from walsender_bridge.doctor import stream
from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.errors import Cause, DivergedError, PublicationError
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.postgres.protocol.replication import ServerTimelines, SystemIdentity
from walsender_bridge.runtime import status_file

SOURCE = CaptureSource("shop", "host=db.example", "tuskline_shop", "tuskline_shop")
REATTACH = "tuskline reattach shop"
LOG = LogPosition(1, 0x900, WalPosition(1, 0x800), system_id=7)
SERVER = stream.WalsenderIdentity(SystemIdentity(7, 1, 0x2000, "shop"), ServerTimelines(1))
SLOT: dict[str, Any] = {
    "slot_name": "tuskline_shop",
    "plugin": "pgoutput",
    "active": False,
    "confirmed_flush_lsn": "0/800",
    "wal_status": "reserved",
}


@pytest.mark.parametrize(
    ("oid", "recorded", "began", "now_called", "fate"),
    [
        # Nothing was there yet; or nothing is known of what was.
        (None, None, False, None, ""),
        (5, None, False, None, ""),
        (5, None, True, None, ""),
        (5, 5, True, "own", ""),
        (None, None, True, None, "dropped:"),
        (None, 5, True, None, "dropped:"),
        (6, 5, True, None, "dropped and recreated:"),
        (None, 5, True, "new", "renamed to 'new':"),
        # Renamed, and another one was made under the name.
        (6, 5, True, "new", "renamed to 'new':"),
    ],
)
def test_a_slot_goes_on_with_the_publication_that_it_began_with(
    oid: int | None, recorded: int | None, began: bool, now_called: str | None, fate: str
) -> None:
    why = publication_mismatch("own", oid, recorded, began=began, now_called=now_called)
    assert why.startswith(f"publication 'own' was {fate}") if fate else why == ""


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"wal_status": "lost"}, "has removed WAL"),
        ({"confirmed_flush_lsn": None}, "has removed WAL"),
        ({"invalidation_reason": "idle_timeout"}, "idle_replication_slot_timeout"),
        ({"invalidation_reason": "wal_level_insufficient"}, "wal_level"),
        ({"invalidation_reason": "wal_removed"}, "has removed WAL"),
        # Not one of ours: that is said elsewhere.
        ({"plugin": None, "confirmed_flush_lsn": None}, ""),
    ],
)
def test_why_a_slot_is_lost(changed: dict[str, Any], why: str) -> None:
    told = lost({**SLOT, **changed})
    assert why in told if why else told == ""


def findings(
    known: KnownPosition | None, slot: dict[str, Any] | None, **more: Any
) -> list[Finding]:
    facts = {"system_id": more.get("system_id", "7"), "slots": [slot] if slot else []}
    return [*stream.evaluate(facts, known, more.get("server", SERVER), SOURCE, "shop")]


def test_doctor_judges_a_stream_as_capture_will() -> None:
    known = KnownPosition(LOG)
    assert findings(known, SLOT) == []
    assert findings(None, None) == [], "nothing is known"
    assert findings(KnownPosition(LogPosition(0, 0, None)), None) == [], "nothing has begun"
    for slot, server in ((None, SERVER), (None, None)):
        (gone,) = findings(known, slot, server=server)
        assert "the slot is gone; the log was confirmed to 0/800" in gone.what
        assert (gone.cause, gone.repair, gone.prevents) == (Cause.DIVERGED, REATTACH, False)
    ahead = {**SLOT, "confirmed_flush_lsn": "0/801"}
    (moved,) = findings(known, ahead)
    assert "recreated or moved" in moved.what
    # A slot in use goes forward; what capture wrote before it was killed is not the last word; and what is lost is named so.
    assert findings(known, {**ahead, "active": True}) == []
    assert findings(replace(known, behind=True), ahead) == []
    assert findings(known, {**ahead, "wal_status": "lost"}) == []
    behind = replace(SERVER, identity=replace(SERVER.identity, flush_lsn=0x850))
    (restored,) = findings(known, SLOT, server=behind)
    assert "restored or replaced" in restored.what
    (other,) = findings(known, None, system_id="8", server=None)
    assert other.check == stream.CLUSTER
    assert "system identifier 7, but the server's is 8" in other.what
    assert other.repair.endswith(REATTACH)


def position(path: Path) -> KnownPosition | None:
    status = status_file.read(path, CaptureStatus)
    assert status is not None
    return of_status(status)


def test_the_status_file_keeps_what_a_later_process_does_not_know_yet(tmp_path: Path) -> None:
    path = tmp_path / "capture.json"
    status = StatusFile(path, "shop", "tuskline_shop")
    status.state("connecting")
    assert position(path) is None
    status.begin(LOG)
    assert position(path) == KnownPosition(LOG)
    status.streaming(7)
    assert position(path) == KnownPosition(LOG, behind=True)
    later = StatusFile(path, "shop", "tuskline_shop")
    later.state("waiting")
    assert position(path) == KnownPosition(LOG, behind=True)
    later.begin(None)
    assert position(path) is None


def test_what_the_server_or_its_stream_says_has_the_source_and_its_repair() -> None:
    told = cannot_continue(SOURCE, PublicationError('publication "tuskline_shop" does not exist'))
    assert isinstance(told, PublicationError)
    assert 'did not exist: publication "tuskline_shop" does not' in told.what
    assert told.repair == REATTACH
    own = PublicationError("publication was dropped", repair=REATTACH)
    assert cannot_continue(SOURCE, own) is own
    other = cannot_continue(SOURCE, DivergedError("it does not fit", where="walsender"))
    assert isinstance(other, DivergedError)
    assert "db.example" in other.where
    assert other.repair.endswith(f"{REATTACH} --force")


def test_doctor_tells_what_only_the_stream_has_shown(tmp_path: Path) -> None:
    config = tmp_path / "tuskline.toml"
    config.write_text(
        '[log]\ndata_dir = "log"\n[[log_server]]\ndata_dir = "log-server"\nlisten = "127.0.0.1:7401"\n'
        '[[source]]\nname = "shop"\ndsn = "host=db.example"\n'
    )
    settings = load_config(config)
    settings.run_dir.mkdir(parents=True)
    (section,) = settings.source
    path = settings.capture_status(section)
    error = DivergedError("the history does not fit", where="db.example", repair=REATTACH)
    # Before it streamed: doctor finds that by itself, or it is mended by now.
    StatusFile(path, "shop", "tuskline_shop").state("stopped", error)
    assert of_capture(settings, section) == []
    path.write_text(json.dumps({**json.loads(path.read_text()), "received_lsn": 5}))
    (found,) = of_capture(settings, section)
    assert (found.what, found.repair, found.cause) == (error.what, REATTACH, Cause.DIVERGED)
    own = Finding("stream", "shop", "", Severity.ERROR, cause=Cause.DIVERGED)
    assert of_capture(settings, section, [own]) == []
