"""What `--json` shows: LSNs as PostgreSQL writes them, times as ISO 8601, in every command that has any."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from slot_sync.status_record import CandidateRecord, SlotsStatus
from spark_consumers.lake.manifest.chain import Manifest, StreamPosition
from spark_consumers.lake.status import EpochStatus
from tests.support import statuses
from walsender_bridge.change_log import repository_messages as of_repository
from walsender_bridge.change_log.protocol import LogStatus, StreamCut
from walsender_bridge.change_log.transactions import LoggedTransaction
from walsender_bridge.cli import epochs, quarantine, safekeeper, status, table
from walsender_bridge.observability import log_tail, log_view, slots_view
from walsender_bridge.observability.observation import Observation, SourceView
from walsender_bridge.observability.quorum_view import QuorumView, SafekeeperView
from walsender_bridge.observability.slots_view import SlotsView
from walsender_bridge.quorum.proposer.status_record import ChangeRecord

NOW = 1_800_000_000.25
ISO = "2027-01-15T08:00:00.250Z"
MICROSECONDS = int(NOW * 1e6)
LSN = 0x1_0000_0A28
_TIME = re.compile(r"(^|_)(at|time)$")
_IS_LSN = re.compile(r"[0-9A-F]{1,8}/[0-9A-F]{1,8}")
_IS_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def values(record: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Each value that is no list and no object, with the name that it has."""
    if isinstance(record, dict):
        for key, value in record.items():
            yield from values(value, key)
    elif isinstance(record, list | tuple):
        for value in record:
            yield from values(value, name)
    else:
        yield name, record


def log() -> LogStatus:
    cut = StreamCut("shop", ("grpc://127.0.0.1:1",), 9, 9, LSN, MICROSECONDS, 1, 1, 100)
    return LogStatus("id", 12, 11, {"shop": cut})


def described() -> log_view.LogView:
    place = of_repository.ReplicaPlace("k", "grpc://127.0.0.1:1", True, 12, True)
    numbers = (1, 12, 9, 100, LSN, MICROSECONDS, 9, 100, 9, 1)
    stream = of_repository.StreamDescription("shop", *numbers, (place,))
    answer = of_repository.DescribeAnswer("id", 12, 12, 11, 9, 3600.0, (stream,), (), {})
    return log_view.LogView(answer, {})


def slot_report() -> SlotsStatus:
    evidence = {"proven_at": MICROSECONDS, "age": 5, "flush_lsn": "1/A28"}
    near = CandidateRecord("near", "db", True, NOW, (), None, None)
    copy = statuses.slot_copy(evidence=evidence)
    return statuses.slots(updated_at=NOW, standbys=(near,), slots=(copy,))


def quorum() -> QuorumView:
    change = ChangeRecord("asked", "", NOW)
    session = statuses.session(updated_at=NOW, commit_lsn="1/A28", change=change)
    safekeepers = (
        SafekeeperView("sk-1", "a:1", statuses.reported(), statuses.safekeeper(), hosted=True),
        SafekeeperView("b:2", "b:2", None),
    )
    return QuorumView(session, True, safekeepers)


def observation() -> Observation:
    lsns = {f"{name}_lsn": LSN for name in ("server", "logged", "committed", "confirmed")}
    gate = statuses.gate(quorum_lsn=LSN, candidate={"flush_lsn": LSN})
    capture = statuses.capture(**lsns, gate=gate)
    server = {"active": True, "wal_status": "reserved", "retained_bytes": 7, "server_lsn": LSN}
    source = SourceView("shop", "tuskline_shop", None, capture, server, None)
    slots = SlotsView(slot_report())
    writing = EpochStatus(2, "write tables", NOW, NOW, tables=9, tables_done=4)
    seen = Observation(NOW, 1, [], [source], log(), manifest(), quorum=quorum(), slots=slots)
    return replace(seen, writing=writing)


def manifest() -> Manifest:
    streams = {"shop": StreamPosition(offset=1, lsn=LSN, commit_time=MICROSECONDS, timeline=1)}
    return Manifest("lake", 1, 1, 0, 1, NOW, steady_at=5.0, streams=streams)


def table_row() -> dict[str, Any]:
    return {"table": "shop.public.orders", "copy": {"began_at": NOW, "rows": 1}}


def quarantined_row() -> dict[str, Any]:
    return {"table": "shop.public.orders", "lsn": "1/A28", "commit_time": MICROSECONDS}


VIEWS = {
    "status": lambda: status.summary(observation()),
    "safekeeper status": lambda: safekeeper.summary(quorum()),
    "slots status": lambda: slots_view.shown(slot_report()),
    "epochs show": lambda: epochs.shown(manifest(), manifest()),
    "log status": lambda: log_view.summary(described()),
    "log tail": lambda: log_tail.record(LoggedTransaction(1, 2, 3, LSN, MICROSECONDS, 1, {})),
    "table list": lambda: table.shown(table_row()),
    "quarantine list": lambda: quarantine.shown(quarantined_row()),
}


@pytest.mark.parametrize("command", VIEWS)
def test_lsns_and_times_are_those_of_people(command):
    found = [*values(VIEWS[command]())]
    times = [value for name, value in found if _TIME.search(name) and value is not None]
    lsns = [value for name, value in found if name.endswith("lsn") and value is not None]
    assert ISO in times
    assert all(isinstance(value, str) and _IS_TIME.fullmatch(value) for value in times), times
    assert all(isinstance(value, str) and _IS_LSN.fullmatch(value) for value in lsns), lsns


def test_the_epoch_under_way_is_told_in_a_line():
    writing = EpochStatus(2, "fold and write", NOW - 95, NOW - 12, tasks=32, tasks_done=3)
    expected = "epoch 2: fold and write, 3 of 32 tasks, for 12 s, 95 s in all"
    assert status._written(writing, NOW) == expected


def test_a_time_that_is_not_known_stays_so():
    assert table.shown({**table_row(), "copy": None})["copy"] is None
    assert table.shown({**table_row(), "copy": {"began_at": 0.0}})["copy"] == {"began_at": None}
    assert quarantine.shown({**quarantined_row(), "commit_time": None})["commit_time"] is None
    assert slots_view.shown(None) == {}
