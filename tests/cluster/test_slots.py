"""Copies of slots on a real pair of servers: a controller makes, proves and drops them; nothing here stops a server."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from slot_sync.apply import carry_out
from slot_sync.controller import Controller, probe
from slot_sync.plan import FailoverCandidate
from slot_sync.resolver.one_slot import GONE_POLLS
from slot_sync.resolver.transitions import Action, CopyState, Reason
from slot_sync.sessions import Sessions
from tests.support import extension
from tests.support.slot_copies import decoded, inspect, rows, slot_names
from tests.support.slot_sync import STANDBY, SlotStack
from tests.support.waiting import wait_for
from walsender_bridge.errors import RunningError


@pytest.fixture
def hung_port() -> Iterator[int]:
    """A port that takes connections, and where nobody ever answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_2_a_slot_that_goes_on_the_primary_goes_on_the_standby(
    synced_pair: SlotStack, controller: Controller
) -> None:
    synced_pair.pair.make_slot("kept")
    synced_pair.pair.make_slot("gone")
    synced_pair.until(controller, "READY", "kept", "gone")
    assert slot_names(synced_pair.pair.standby) == {"kept", "gone"}
    synced_pair.pair.on_primary("SELECT pg_drop_replication_slot('gone')")
    # Not at the first look: a server that was asked by mistake has no slots either.
    assert synced_pair.states(controller)["gone"] is CopyState.ORPHAN
    assert slot_names(synced_pair.pair.standby) == {"kept", "gone"}
    wait_for(lambda: "gone" not in synced_pair.states(controller), 10, "it is forgotten")
    assert slot_names(synced_pair.pair.standby) == {"kept"}
    assert synced_pair.states(controller) == {"kept": CopyState.READY}


def test_4_a_copy_that_is_dropped_behind_our_back_is_made_again(
    synced_pair: SlotStack, controller: Controller
) -> None:
    synced_pair.pair.make_slot("kept")
    synced_pair.until(controller, "READY", "kept")
    synced_pair.pair.on_standby("SELECT tuskline_slots.drop('kept')")
    assert not controller.once(10)[STANDBY].ready
    synced_pair.until(controller, "READY", "kept")
    assert inspect(synced_pair.pair.standby, "kept")["snapshot_present"]


def test_7_a_copy_tells_the_standbys_own_story(
    synced_pair: SlotStack, controller: Controller
) -> None:
    synced_pair.pair.make_slot("kept")
    synced_pair.until(controller, "READY", "kept")
    activity = "SELECT active, active_pid FROM pg_replication_slots WHERE slot_name = 'kept'"
    with synced_pair.streaming("kept"):
        assert rows(synced_pair.pair.primary, activity)[0][0]
        synced_pair.load.write()
        synced_pair.pair.catch_up()
        assert controller.once(10)[STANDBY].ready
        assert rows(synced_pair.pair.standby, activity) == [(False, None)]
    if synced_pair.pair.major >= 17:
        since = "SELECT inactive_since FROM pg_replication_slots WHERE slot_name = 'kept'"
        assert rows(synced_pair.pair.standby, since)[0][0] is not None


def test_9_a_copy_that_somebody_reads_from_is_found_out(
    synced_pair: SlotStack, controller: Controller
) -> None:
    """Who reads from a copy moves it ahead of its slot: what the client has not got would be left out."""
    if synced_pair.pair.major < 16:
        pytest.skip("nobody can decode on a standby before 16")
    synced_pair.pair.make_slot("kept")
    synced_pair.until(controller, "READY", "kept")
    synced_pair.load.write(5)
    synced_pair.pair.catch_up()
    rows(
        synced_pair.pair.standby,
        "SELECT count(*) FROM pg_logical_slot_get_binary_changes('kept', NULL, NULL,"
        " 'proto_version', '1', 'publication_names', 'pub')",
    )
    first = controller.once(10)[STANDBY]
    assert not first.ready
    assert first.transitions[0].reason == "ahead"
    # Three polls in a row: then it is made again, and gives all five.
    wait_for(
        lambda: (
            synced_pair.states(controller).get("kept") is CopyState.MISSING
            or not slot_names(synced_pair.pair.standby) & {"kept"}
        ),
        20,
        "it is dropped",
    )
    expected = decoded(synced_pair.pair.primary, "kept")
    synced_pair.until(controller, "READY", "kept")
    assert len(expected) >= 5


def test_9_a_copy_in_use_is_left_alone_until_it_is_not(
    synced_pair: SlotStack, controller: Controller
) -> None:
    if synced_pair.pair.major < 16:
        pytest.skip("nobody can decode on a standby before 16")
    for name in ("used", "other"):
        synced_pair.pair.make_slot(name)
    synced_pair.until(controller, "READY", "used", "other")
    with synced_pair.streaming("used", server=synced_pair.pair.standby):
        synced_pair.pair.on_primary("SELECT pg_drop_replication_slot('used')")
        for _ in range(5):
            report = controller.once(10)[STANDBY]
            assert not report.failures
        assert "used" in slot_names(synced_pair.pair.standby)
        assert {each.slot: each.after for each in report.transitions}["other"] is CopyState.READY
    wait_for(lambda: "used" not in synced_pair.states(controller), 20, "it is dropped")
    assert slot_names(synced_pair.pair.standby) == {"other"}


def test_18_a_copy_without_a_snapshot_is_never_ready(
    synced_pair: SlotStack, controller: Controller
) -> None:
    """Fact 1: while a transaction that was in progress goes on, no position alone makes a copy whole."""
    with psycopg.connect(synced_pair.pair.primary.dsn()) as early:
        synced_pair.pair.make_slot("first")
        early.execute("INSERT INTO shop VALUES (100001, 'row-100001')")
        synced_pair.pair.on_primary(
            "CHECKPOINT", "SELECT pg_replication_slot_advance('first', pg_current_wal_lsn())"
        )
        for _ in range(15):
            synced_pair.load.write()
            synced_pair.pair.catch_up()
            report = controller.once(10)[STANDBY]
            found = {each.slot: each for each in report.transitions}["first"]
            assert not found.safe
            assert "first" not in slot_names(synced_pair.pair.standby)
            time.sleep(0.1)
        early.commit()
    synced_pair.until(controller, "READY", "first")
    assert inspect(synced_pair.pair.standby, "first")["snapshot_present"]


def test_21_a_foreign_slot_of_the_name_is_left_alone_and_the_others_go_on(
    synced_pair: SlotStack, controller: Controller
) -> None:
    synced_pair.pair.make_slot("taken")
    synced_pair.pair.make_slot("free")
    synced_pair.pair.reserve("_tuskline_tmp_by_hand", "taken")
    synced_pair.pair.prove("_tuskline_tmp_by_hand", "taken")
    synced_pair.pair.on_standby("SELECT tuskline_slots.rename('_tuskline_tmp_by_hand', 'taken')")
    before = inspect(synced_pair.pair.standby, "taken")
    report = synced_pair.until(controller, "READY", "free")
    taken = next(each for each in report.transitions if each.slot == "taken")
    assert taken.after in {CopyState.CONFLICT, CopyState.STALE_BACKUP}
    assert taken.repair
    assert not report.ready
    assert inspect(synced_pair.pair.standby, "taken") == before


def test_43_a_second_machine_leaves_good_copies_alone_and_takes_them_over(
    synced_pair: SlotStack, tmp_path: Path
) -> None:
    pair = synced_pair.pair
    pair.make_slot("kept")
    elsewhere = replace(synced_pair.plan(), folder=tmp_path / "elsewhere")
    with synced_pair.controller() as first:
        synced_pair.until(first, "READY", "kept")
        before = inspect(pair.standby, "kept")
        found = probe(elsewhere)
        (kept,) = found[STANDBY].transitions
        assert (kept.after, kept.reason) == (CopyState.KEPT_ELSEWHERE, Reason.OTHER_CONTROLLER)
        assert found.ready is None
        assert "drop" not in " ".join(found[STANDBY].problems)
        assert first.once(10).ready
        assert inspect(pair.standby, "kept") == before
    with Controller(elsewhere) as second:
        synced_pair.until(second, "READY", "kept")
        assert probe(elsewhere).ready
        # It is the same copy, and the first machine knows it still.
        assert inspect(pair.standby, "kept")["marker"] == before["marker"]
        assert synced_pair.states(second) == {"kept": CopyState.READY}
        # One that the second machine makes anew is not the first one's.
        pair.on_standby("SELECT tuskline_slots.drop('kept')")
        synced_pair.until(second, "READY", "kept")
    (kept,) = probe(synced_pair.plan())[STANDBY].transitions
    assert kept.after is CopyState.KEPT_ELSEWHERE
    with synced_pair.controller() as first:
        synced_pair.until(first, "READY", "kept")
    assert inspect(pair.standby, "kept")["marker"] != before["marker"]


def test_21_a_slot_that_takes_the_name_of_our_copy_is_not_taken_for_it(
    synced_pair: SlotStack, controller: Controller
) -> None:
    pair = synced_pair.pair
    pair.make_slot("kept")
    synced_pair.until(controller, "READY", "kept")
    pair.on_standby("SELECT tuskline_slots.drop('kept')")
    pair.reserve("_tuskline_tmp_by_hand", "kept")
    pair.prove("_tuskline_tmp_by_hand", "kept")
    pair.on_standby("SELECT tuskline_slots.rename('_tuskline_tmp_by_hand', 'kept')")
    before = inspect(pair.standby, "kept")
    assert synced_pair.states(controller)["kept"] in {CopyState.CONFLICT, CopyState.STALE_BACKUP}
    # It is somebody else's when the primary has no such slot, too.
    pair.on_primary("SELECT pg_drop_replication_slot('kept')")
    for _ in range(GONE_POLLS + 1):
        controller.once(10)
    assert inspect(pair.standby, "kept") == before


def test_22_one_stuck_slot_among_many_holds_up_no_other(
    synced_pair: SlotStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"many_{number}" for number in range(6)]
    over = threading.Event()

    def slow(action: Action, standby: Sessions, primary: Sessions) -> None:
        if "many_3" in str(action):
            over.wait(60)
        else:
            carry_out(action, standby, primary)

    monkeypatch.setattr("slot_sync.copier.carry_out", slow)
    for name in names:
        synced_pair.pair.make_slot(name)
    others = [name for name in names if name != "many_3"]
    with synced_pair.watching() as reports:

        def ready() -> bool:
            synced_pair.turn_over(*names)
            found = (
                {each.slot: each for each in reports[-1][STANDBY].transitions} if reports else {}
            )
            return all(name in found and found[name].safe for name in others)

        # Less than what the stuck one takes.
        wait_for(ready, 45, "the others are ready")
        last = reports[-1][STANDBY]
        assert not last.ready
        assert "many_3" not in slot_names(synced_pair.pair.standby)
        assert "many_3" in last.busy
    over.set()


def test_22_a_candidate_that_hangs_holds_up_no_other(
    synced_pair: SlotStack, hung_port: int
) -> None:
    synced_pair.pair.make_slot("kept")
    dead = FailoverCandidate(
        "dead", f"host=127.0.0.1 port={hung_port} connect_timeout=3", "nowhere"
    )
    with synced_pair.watching(dead) as reports:

        def ready() -> bool:
            synced_pair.turn_over("kept")
            return bool(reports and STANDBY in reports[-1].rounds and reports[-1][STANDBY].ready)

        wait_for(ready, 60, "the other is ready")
        wait_for(lambda: "dead" in reports[-1].rounds, 20, "it is told of the dead one")
        assert reports[-1]["dead"].ready is None
        assert reports[-1].ready is None


def test_24_temporary_slots_are_ignored(synced_pair: SlotStack, controller: Controller) -> None:
    synced_pair.pair.make_slot("kept")
    with psycopg.connect(synced_pair.pair.primary.dsn(), autocommit=True) as session:
        session.execute("SELECT pg_create_logical_replication_slot('own', 'pgoutput', true)")
        report = synced_pair.until(controller, "READY", "kept")
        assert [each.slot for each in report.transitions] == ["kept"]
        assert report.ready


def test_25_a_database_that_is_dropped_takes_its_slots_along(
    synced_pair: SlotStack, controller: Controller
) -> None:
    pair = synced_pair.pair
    pair.make_slot("kept")
    pair.on_primary("CREATE DATABASE passing")
    extension.create_extension(pair.primary, pair.library, "passing")
    with psycopg.connect(pair.primary.dsn("passing"), autocommit=True) as session:
        session.execute("SELECT pg_create_logical_replication_slot('elsewhere', 'pgoutput')")
    advance = "SELECT pg_replication_slot_advance('elsewhere', pg_current_wal_lsn())"

    def ready() -> bool:
        synced_pair.turn_over("kept")
        with psycopg.connect(pair.primary.dsn("passing"), autocommit=True) as session:
            session.execute(advance.encode())
        pair.catch_up()
        return bool(controller.once(10)[STANDBY].ready)

    wait_for(ready, 30, "both are ready")
    assert slot_names(pair.standby) == {"kept", "elsewhere"}
    pair.on_primary("DROP DATABASE passing")
    # A session of ours in it would hold up the standby's replay only as long as PostgreSQL lets it.
    pair.catch_up()
    assert slot_names(pair.standby) == {"kept"}
    wait_for(lambda: "elsewhere" not in synced_pair.states(controller), 10, "it is forgotten")
    assert controller.once(10)[STANDBY].ready


@pytest.fixture
def moved(synced_pair: SlotStack) -> Iterator[str]:
    """A database with a slot `elsewhere` whose copy is ready; a tablespace `other`, and replay that stands still."""
    pair, name = synced_pair.pair, "moving"
    pair.on_primary(
        "SET allow_in_place_tablespaces = on",
        "CREATE TABLESPACE other LOCATION ''",
        f"CREATE DATABASE {name}",
    )
    extension.create_extension(pair.primary, pair.library, name)
    with psycopg.connect(pair.primary.dsn(name), autocommit=True) as session:
        session.execute("SELECT pg_create_logical_replication_slot('elsewhere', 'pgoutput')")
    yield name
    rows(pair.standby, "SELECT pg_wal_replay_resume()")
    found = "SELECT datname FROM pg_database WHERE datname IN ('moving', 'renamed')"
    with suppress(psycopg.errors.UndefinedObject):
        pair.on_primary("SELECT pg_drop_replication_slot('elsewhere')")
    for (name,) in rows(pair.primary, found):
        pair.on_primary(f"DROP DATABASE {name}")
    pair.on_primary("DROP TABLESPACE other")
    pair.catch_up()


def _follow_until_ready(stack: SlotStack, controller: Controller, name: str) -> None:
    """The client of `elsewhere` reads on until its copy is ready; then replay stands still."""
    pair = stack.pair

    def ready() -> bool:
        stack.load.write()
        pair.on_primary("CHECKPOINT")
        with psycopg.connect(pair.primary.dsn(name), autocommit=True) as session:
            session.execute(
                b"SELECT pg_replication_slot_advance('elsewhere', pg_current_wal_lsn())"
            )
        pair.catch_up()
        return bool(controller.once(10)[STANDBY].ready)

    wait_for(ready, 60, "the copy is ready")
    rows(pair.standby, "SELECT pg_wal_replay_pause()")


def test_48_a_move_of_the_database_that_is_not_replayed_drops_the_copy_later(
    synced_pair: SlotStack, moved: str
) -> None:
    """The slot stays on the primary; replay, and so a promotion, drops the copy with the database's old folder."""
    pair = synced_pair.pair
    with synced_pair.controller() as controller:
        _follow_until_ready(synced_pair, controller, moved)
    # A session of the controller's would be in the way.
    pair.on_primary(f"ALTER DATABASE {moved} SET TABLESPACE other")
    assert slot_names(pair.primary) == slot_names(pair.standby) == {"elsewhere"}
    with synced_pair.controller() as controller:
        found = synced_pair.found(controller, "elsewhere")
        assert (found.after, found.reason) == (CopyState.SUSPECT, Reason.DATABASE_PENDING)
        rows(pair.standby, "SELECT pg_wal_replay_resume()")
        synced_pair.load.write()  # the server flushes its own last record with the next one only
        pair.catch_up()
        assert slot_names(pair.standby) == set()
        _follow_until_ready(synced_pair, controller, moved)


def test_49_a_database_that_is_renamed_keeps_its_copies(synced_pair: SlotStack, moved: str) -> None:
    pair = synced_pair.pair
    with synced_pair.controller() as controller:
        _follow_until_ready(synced_pair, controller, moved)
    marker = inspect(pair.standby, "elsewhere")["marker"]
    pair.on_primary(f"ALTER DATABASE {moved} RENAME TO renamed")
    with synced_pair.controller() as controller:
        for _ in range(3):
            found = synced_pair.found(controller, "elsewhere")
            assert (found.after, found.reason) == (CopyState.SUSPECT, Reason.DATABASE_PENDING)
        rows(pair.standby, "SELECT pg_wal_replay_resume()")
        _follow_until_ready(synced_pair, controller, "renamed")
    assert inspect(pair.standby, "elsewhere")["marker"] == marker


def test_29_of_two_controllers_one_acts(synced_pair: SlotStack, controller: Controller) -> None:
    synced_pair.pair.make_slot("kept")
    controller.once(10)
    with synced_pair.controller() as second:
        with pytest.raises(RunningError, match="another controller"):
            second.once(0.3)
        report = synced_pair.until(controller, "READY", "kept")
        assert report.ready
        controller.close()
        # Its turn now, with what the first one wrote down.
        assert wait_for(lambda: second.once(5)[STANDBY].ready, 30, "the second has its turn")
    assert slot_names(synced_pair.pair.standby) == {"kept"}
