"""The commit gate on real servers: consumers get what the candidates have, and no more."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from spark_consumers.lake.flush import _Patience
from tests.support.attached import Attached
from tests.support.capture_stack import (
    STREAM,
    ChangeLog,
    Load,
    check_equal,
    make_tables,
)
from tests.support.fake_standby import FakeStandby
from tests.support.gate_stack import (
    CANDIDATE,
    gated,
    holding,
    insert,
    logged,
    make_candidate,
    make_slot,
    synced,
)
from tests.support.servers import DEFAULT, MAJORS_IN_TURN, Database, MakeServer, majors
from tests.support.slot_failover import several
from tests.support.waiting import wait_for
from tests.support.wal_server import promote
from walsender_bridge.capture.gate.core import Rule
from walsender_bridge.capture.gate.record import decisions
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.errors import Cause, DeadlineError
from walsender_bridge.postgres.protocol import pgoutput
from walsender_bridge.postgres.protocol.lsn import MAX_LSN, WalPosition
from walsender_bridge.runtime.commit_page import CommitPage, CommitPageWriter
from walsender_bridge.runtime.sql import load

#: Seconds in which a gate that lets something pass would have done so many times over.
QUIET = 0.7


@pytest.fixture
def slot(shop: Database) -> Iterator[str]:
    """A candidate's slot on the shared server."""
    make_slot(shop.dsn)
    yield CANDIDATE
    wait_for(lambda: not _slot(shop.dsn)["active"], 30, "nobody streams any more")
    shop.execute(f"SELECT pg_drop_replication_slot('{CANDIDATE}')")


def _slot(dsn: str, name: str = CANDIDATE) -> dict[str, Any]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "SELECT active, (restart_lsn - '0/0'::pg_lsn)::bigint FROM pg_replication_slots"
            " WHERE slot_name = %s",
            [name],
        ).fetchone()
    assert row is not None
    return {"active": row[0], "lsn": row[1]}


def _position(dsn: str) -> WalPosition:
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(load("flush/position").encode()).fetchone()
    assert row is not None
    return WalPosition(timeline=row[1], lsn=row[0])


def _wait_slot(dsn: str, lsn: int) -> None:
    wait_for(lambda: _slot(dsn)["lsn"] == lsn, 10, "the candidate has said so")


def _wait_shown(log: ChangeLog, after: int) -> None:
    wait_for(lambda: log.committed_lsn() > after, 30, "it flows")


def stays(check: Callable[[], Any], seconds: float = QUIET) -> None:
    """The answer is the same for a while."""
    first, deadline = check(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert check() == first
        time.sleep(0.02)


@pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True)
def test_36_a_candidate_that_has_a_commit_record_but_for_its_end_releases_nothing(
    tmp_path: Path, log: ChangeLog, shop: Database, slot: str
) -> None:
    with (
        FakeStandby(shop.dsn, slot) as standby,
        gated(tmp_path, log, shop.dsn) as capture,
    ):
        wait_for(capture.streams, 30, "capture streams")
        # Once its publication is there, which the decoder looks up as of each change.
        shop.execute("SELECT pg_create_logical_replication_slot('peek', 'pgoutput')")
        insert(shop.dsn, 1)
        with shop.connect() as connection:
            rows = connection.execute(
                "SELECT data FROM pg_logical_slot_peek_binary_changes('peek', NULL, NULL,"
                " 'proto_version', '1', 'publication_names', %s)",
                [f"tuskline_{STREAM}"],
            ).fetchall()
        messages = [bytes(data) for (data,) in rows]
        commit = pgoutput.parse_commit([m for m in messages if m[0] == pgoutput.COMMIT][-1])
        wait_for(lambda: logged(log) >= commit.end_lsn, 30, "the log holds it")
        for flushed in (commit.commit_lsn, commit.end_lsn - 1):
            standby.flushed = flushed
            _wait_slot(shop.dsn, flushed)
            stays(log.committed_lsn)
            assert log.committed_lsn() < commit.end_lsn
            wait_for(lambda: f"slot {slot}: its standby has" in holding(capture), 10, "it is told")
        standby.flushed = commit.end_lsn
        began = time.monotonic()
        wait_for(lambda: log.committed_lsn() >= commit.end_lsn, 10, "it is shown")
        print(f"shown {time.monotonic() - began:.3f} s after its standby had it")
        wait_for(lambda: not holding(capture), 10, "nothing waits")
    shop.execute("SELECT pg_drop_replication_slot('peek')")


@pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True)
def test_15_a_slot_that_pg_receivewal_or_nobody_uses_blocks_by_name(
    tmp_path: Path, log: ChangeLog, shop: Database, slot: str
) -> None:
    with gated(tmp_path, log, shop.dsn) as capture:
        wait_for(capture.streams, 30, "capture streams")
        end = insert(shop.dsn, 1)
        wait_for(lambda: "is not in use" in holding(capture), 30, "the reason")
        assert f"slot {slot} " in holding(capture)
        with FakeStandby(shop.dsn, slot, replays=False) as tool:
            tool.flushed = end
            wait_for(lambda: "does not replay WAL" in holding(capture), 30, "the reason")
            stays(log.committed_lsn)
        assert log.committed_lsn() == 0
        with FakeStandby(shop.dsn, slot) as standby:
            standby.flushed = end
            wait_for(lambda: log.committed_lsn() > 0, 30, "a standby has it")


@pytest.fixture
def primary(make_server: MakeServer, request: pytest.FixtureRequest) -> LocalServer:
    """A server of the test's own, with the two tables and the candidate's slot."""
    major = getattr(request, "param", DEFAULT)
    server = make_server(major, fsync="off", wal_sender_timeout="2s")
    server.start()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        make_tables(connection)
    make_slot(server.dsn())
    return server


def walsender(dsn: str) -> int | None:
    """Who serves capture."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        row = connection.execute(
            "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s",
            [f"tuskline_{STREAM}"],
        ).fetchone()
    return None if row is None else row[0]


@pytest.mark.parametrize("primary", MAJORS_IN_TURN, indirect=True)
def test_5_14_33_a_candidate_that_is_down_holds_consumers_and_the_server_keeps_its_connection(
    tmp_path: Path, log: ChangeLog, primary: LocalServer
) -> None:
    dsn = primary.dsn()
    # 33: what it has flushed counts, however late it applies it. (After a restart it applies what it has before it
    # streams, and so late.)
    place, delay = primary.folder.with_name("standby"), 5.0
    standby = make_candidate(primary, place, recovery_min_apply_delay=f"{delay:.0f}s")
    try:
        standby.start()
        with gated(tmp_path, log, dsn) as capture:
            wait_for(capture.streams, 30, "capture streams")
            for number in (0, 100):
                sent = time.monotonic()
                before = logged(log)
                insert(dsn, number)
                _wait_shown(log, before)
                seconds = time.monotonic() - sent
                print(f"shown {seconds:.3f} s after its commit")
                assert seconds < delay
                standby.stop("fast")
                before, serving = log.committed_lsn(), walsender(dsn)
                insert(dsn, *range(number + 1, number + 50))
                wait_for(lambda: "is not in use" in holding(capture), 30, "the reason")
                # Once for longer than wal_sender_timeout: capture answers meanwhile, and goes on reading.
                time.sleep(QUIET if number else 3.0)
                assert log.committed_lsn() == before
                assert logged(log) > before
                assert walsender(dsn) == serving
                assert capture.status()["state"] == "streaming"
                standby.start()
                wait_for(lambda: log.committed_lsn() == logged(log), 30, "it flows again")
            check_equal(log, dsn)
            # 14: whoever takes the candidate off the list need not wait for it.
            standby.stop("fast")
            before = log.committed_lsn()
            insert(dsn, 200)
            wait_for(lambda: logged(log) > before, 30, "the log holds it")
            stays(log.committed_lsn)
            assert capture.stop() == 0
            capture.settings = replace(capture.settings, gate=Rule())
            capture.start()
            check_equal(log, dsn)
    finally:
        standby.destroy()


@pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True)
def test_a_candidate_that_stays_away_is_left_out_on_the_record_and_counts_again_when_it_is_back(
    tmp_path: Path, log: ChangeLog, shop: Database, slot: str
) -> None:
    rule = Rule((slot,), on_missing="degrade", degrade_after=1)
    with gated(tmp_path, log, shop.dsn, rule) as capture:
        wait_for(capture.streams, 30, "capture streams")
        insert(shop.dsn, 1)
        wait_for(lambda: log.committed_lsn() > 0, 30, "it is left out")
        told = list(decisions(tmp_path / "gate.jsonl"))
        assert [each["decision"] for each in told] == ["timeline", "degraded"]
        assert "is not in use" in told[1]["why"]
        # A new session does not wait for it again, which would take longer than the test.
        capture.kill()
        capture.settings = replace(capture.settings, gate=replace(rule, degrade_after=3600))
        capture.start()
        wait_for(capture.streams, 30, "capture streams")
        end = insert(shop.dsn, 2)
        wait_for(lambda: log.committed_lsn() >= end - 1000, 30, "no second wait")
        with FakeStandby(shop.dsn, slot) as standby:
            standby.flushed = insert(shop.dsn)
            wait_for(
                lambda: [*decisions(tmp_path / "gate.jsonl")][-1]["decision"] == "rejoined",
                30,
                "it counts again",
            )
            end = insert(shop.dsn, 3)
            wait_for(lambda: logged(log) >= end - 1000, 30, "the log holds it")
            wait_for(lambda: "its standby has" in holding(capture), 30, "it is waited for")
            standby.flushed = insert(shop.dsn)
            check = log.committed_lsn
            wait_for(lambda: check() == logged(log), 30, "it flows")


@pytest.mark.skipif(18 not in majors(), reason="PostgreSQL 18 synchronizes slots by itself")
def test_5_6_17_a_promoted_candidate_goes_on_where_consumers_are_and_a_tail_it_lacks_is_cut_off(
    tmp_path: Path, log: ChangeLog, make_server: MakeServer
) -> None:
    primary = make_server(18, fsync="off")
    primary.start()
    with psycopg.connect(primary.dsn(), autocommit=True) as connection:
        make_tables(connection)
    make_slot(primary.dsn())
    place = primary.folder.with_name("standby")
    standby = make_candidate(primary, place, sync_replication_slots="on")
    try:
        standby.start()
        dsn = several(primary, standby)
        with gated(tmp_path, log, dsn) as capture, ExitStack() as stack:
            wait_for(capture.streams, 30, "capture streams")
            load = stack.enter_context(Load(dsn))
            wait_for(lambda: log.committed_lsn() > 0, 30, "it flows")
            # The standby's copy of the slot, which the server calls ready once it has caught up.
            wait_for(lambda: synced(primary, standby), 30, "the slot is on the standby")
            standby.stop("fast")
            shown = log.committed_lsn()
            wait_for(lambda: logged(log) > shown + 20_000, 30, "the log holds a tail")
            primary.kill()
            held = logged(log)
            assert held > log.committed_lsn()
            # Nobody feeds it any more: what it has is what it had.
            standby.start()
            promote(standby)
            wait_for(lambda: log.committed_lsn() > held, 60, "it goes on on the new primary")
            load.stop()
            found = check_equal(log, standby.dsn())
        assert shown in found.ends
        told = [each["decision"] for each in decisions(tmp_path / "gate.jsonl")]
        assert told == ["timeline", "promoted"]
        output = capture.output.read_text()
        assert "cutting off the uncommitted tail of the log" in output
    finally:
        standby.destroy()


@pytest.mark.parametrize("primary", MAJORS_IN_TURN, indirect=True)
def test_what_consumers_have_and_a_promoted_server_lacks_is_a_divergence_and_nothing_is_cut(
    tmp_path: Path, log: ChangeLog, primary: LocalServer
) -> None:
    standby = make_candidate(primary, primary.folder.with_name("standby"))
    try:
        with gated(tmp_path, log, several(primary, standby)) as capture:
            wait_for(capture.streams, 30, "capture streams")
            assert capture.stop() == 0
            # Without its gate: the operator takes the risk, and it comes true.
            capture.settings = replace(capture.settings, gate=Rule())
            capture.start()
            insert(primary.dsn(), *range(1, 200))
            here = _position(primary.dsn())
            insert(primary.dsn(), 200)
            assert _Patience(60.0, None).barrier(log.address, {STREAM: here}) > 0
            check_equal(log, primary.dsn())
            before = log.replica_status()
            primary.stop("immediate")
            standby.start()
            promote(standby)
            assert capture.wait(60) == Cause.DIVERGED
            after = log.replica_status()
            assert (after.end_offset, after.committed_end) == (
                before.end_offset,
                before.committed_end,
            )
            assert "has diverged" in capture.output.read_text()
        # The log is past all that was written there, and holds none of it: `flush` is not to take it for the same.
        there = _position(standby.dsn())
        assert (there.timeline, there.lsn < before.committed_end_lsn) == (2, True)
        with pytest.raises(DeadlineError, match="is on timeline 2, but the log ends on timeline 1"):
            _Patience(1.0, None).barrier(log.address, {STREAM: there})
    finally:
        standby.destroy()


def test_15_an_operator_is_told_who_holds_consumers_up(
    tmp_path: Path, shop: Database, slot: str
) -> None:
    with Attached(tmp_path, {STREAM: {"dsn": shop.dsn}}) as tuskline:
        with tuskline.config.open("a") as config:
            config.write(f'[gate]\ncandidates = ["{slot}", "gone"]\n')
        tuskline.json("init")
        tuskline.up()

        def status() -> dict[str, Any]:
            done = tuskline.run("status", "--json")
            found: dict[str, Any] = json.loads(done.stdout)
            assert bool(done.returncode) == bool(found["problems"])
            return found

        wait_for(lambda: status()["sources"][0]["state"] == "streaming", 60, "capture streams")
        insert(shop.dsn, 1)
        told = wait_for(lambda: [w for w in status()["problems"] if "gate" in w], 90, "it says so")
        assert f"slot {slot} is not in use" in told[0]
        assert "slot gone does not exist on the server" in told[0]
        found = {row["candidate"]: row for row in status()["gate"]}
        assert (found["gone"]["standing"], found["gone"]["lsn"]) == ("counted", None)
        lag = {row["stage"]: row for row in tuskline.json("lag")["sources"]}
        assert lag["gate"]["bytes"] > 0
        report = tuskline.json("doctor", code=Cause.SLOT)
        checks = [each for each in report["findings"] if each["check"] == "commit gate"]
        assert [each["severity"] for each in checks] == ["error", "error"]
        shop.execute("SELECT pg_create_physical_replication_slot('gone', true)")
        with FakeStandby(shop.dsn, slot) as one, FakeStandby(shop.dsn, "gone") as two:
            one.flushed = two.flushed = insert(shop.dsn)
            wait_for(lambda: not status()["problems"], 90, "all is well")
            report = tuskline.json("doctor")
            checks = [each for each in report["findings"] if each["check"] == "commit gate"]
            assert [each["severity"] for each in checks] == ["ok", "ok"]
        assert tuskline.stop_up() == 0
        tuskline.json("detach")
    wait_for(lambda: not _slot(shop.dsn, "gone")["active"], 30, "nobody streams any more")
    shop.execute("SELECT pg_drop_replication_slot('gone')")


@pytest.mark.parametrize("pg_server", MAJORS_IN_TURN, indirect=True)
def test_only_a_fresh_page_of_the_quorum_lets_transactions_pass(
    tmp_path: Path, log: ChangeLog, shop: Database
) -> None:
    path = tmp_path / "commit.page"
    with psycopg.connect(shop.dsn) as connection:
        row = connection.execute(
            "SELECT system_identifier, timeline_id FROM pg_control_system(), pg_control_checkpoint()"
        ).fetchone()
    assert row is not None
    fresh = CommitPage(row[0], row[1], MAX_LSN)
    with gated(tmp_path, log, shop.dsn, Rule(safekeepers=True), path) as capture:
        wait_for(capture.streams, 30, "capture streams")
        insert(shop.dsn, 1)
        wait_for(lambda: f"{path} is missing" in holding(capture), 30, "a missing page holds")
        CommitPageWriter(path).write(fresh)
        wait_for(lambda: "is stopped, or hangs" in holding(capture), 30, "a stale page holds")
        with _renewing(path, replace(fresh, system_id=fresh.system_id + 1)):
            wait_for(lambda: "another server" in holding(capture), 30, "another's page holds")
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        wait_for(lambda: "is damaged" in holding(capture), 30, "a damaged page holds")
        assert log.committed_lsn() == 0
        with _renewing(path, fresh):
            _wait_shown(log, 0)
            wait_for(lambda: not holding(capture), 10, "nothing waits")


@contextmanager
def _renewing(path: Path, page: CommitPage) -> Iterator[None]:
    """A proposer that writes this page."""
    writer, ended = CommitPageWriter(path), threading.Event()

    def renew() -> None:
        while not ended.wait(0.05):
            writer.write(page)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
