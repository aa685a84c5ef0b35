"""42: a gate whose candidates are named by member, as HA managers do it, over failovers forth and back."""

from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from tests.support.capture_stack import CaptureProcess, ChangeLog, make_tables
from tests.support.gate_stack import (
    gated,
    holding,
    insert,
    logged,
    make_candidate,
    make_slot,
    synced,
)
from tests.support.servers import MakeServer, majors
from tests.support.slot_failover import several
from tests.support.waiting import wait_for
from tests.support.wal_server import promote, run
from walsender_bridge.capture.gate.core import Rule
from walsender_bridge.capture.gate.record import decisions
from walsender_bridge.demo.local_server import LocalServer

FAILOVERS = 2
NAMES = ("node_a", "node_b")


def one_turn(
    log: ChangeLog, capture: CaptureProcess, server: LocalServer, standby: LocalServer, other: str
) -> None:
    """Nothing passes without the other member, and all with it, until the slot is on it, too."""
    wait_for(capture.streams, 60, "capture streams")
    before = log.committed_lsn()
    insert(server.dsn(), before)
    wait_for(lambda: logged(log) > before, 30, "the log holds it")
    wait_for(lambda: f"slot {other} is not in use" in holding(capture), 30, "it is said")
    assert log.committed_lsn() == before
    standby.start()
    wait_for(lambda: log.committed_lsn() == logged(log), 60, "the other member has it")

    def standings() -> dict[str, str]:
        gate = capture.status()["gate"]
        assert gate["open"] is False
        return {each["slot"]: each["standing"] for each in gate["candidates"]}

    expected = {name: "counted" if name == other else "promoted" for name in NAMES}
    wait_for(lambda: standings() == expected, 30, "the server is known")
    wait_for(lambda: synced(server, standby), 60, "the slot is on the standby")


@pytest.mark.skipif(18 not in majors(), reason="PostgreSQL 18 synchronizes slots by itself")
def test_42_members_names_fit_after_failovers_forth_and_back(
    tmp_path: Path, log: ChangeLog, make_server: MakeServer
) -> None:
    server = make_server(18, fsync="off")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
    rule = Rule(NAMES, members=True)
    with ExitStack() as stack:
        for number in range(FAILOVERS + 1):
            # As an HA manager does it: a slot for each member but itself, and settings that it writes anew at times.
            other = NAMES[(number + 1) % 2]
            make_slot(server.dsn(), other)
            place = server.folder.with_name(f"standby-{number}")
            standby = make_candidate(server, place, other, sync_replication_slots="on")
            stack.callback(standby.destroy)
            if number % 2:
                run(server, "ALTER SYSTEM SET primary_slot_name = ''", "SELECT pg_reload_conf()")
            with gated(tmp_path, log, several(server, standby), rule) as capture:
                one_turn(log, capture, server, standby, other)
            server.kill()
            promote(standby)
            server = standby
        told = [
            (each["timeline"], each["candidate"]) for each in decisions(tmp_path / "gate.jsonl")
        ]
        named = [each for each in told if each[1]]
        assert named == [(1 + number, NAMES[number % 2]) for number in range(FAILOVERS + 1)]
