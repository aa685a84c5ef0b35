"""What a promotion finds, and what comes after it; each test has a pair of its own."""

from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from slot_sync.controller import Controller, probe
from slot_sync.plan import FailoverCandidate, SlotSyncPlan
from slot_sync.resolver.observed import Selection
from slot_sync.resolver.transitions import CopyState
from tests.support.extension import ONE
from tests.support.slot_copies import decoded, inspect, received, rows, slot_names
from tests.support.slot_sync import STANDBY, SlotStack, slot_stack
from tests.support.waiting import wait_for
from tests.support.wal_server import backup, follow


@pytest.mark.parametrize("major", ONE)
def test_6_a_client_goes_on_after_a_promotion(major: int, tmp_path: Path) -> None:
    with slot_stack(major, tmp_path) as synced_pair:
        synced_pair.pair.make_slot("kept")
        with synced_pair.controller() as controller:
            synced_pair.until(controller, "READY", "kept")
            # Its client has these, and the copy has not heard of it.
            synced_pair.load.write(20)
            synced_pair.consume("kept")
            synced_pair.load.write(20)
            synced_pair.pair.catch_up()
            assert controller.once(10)[STANDBY].ready
        before = synced_pair.read["kept"]
        confirmed = set(before)
        synced_pair.pair.promote()
        after = received(synced_pair.pair.standby, "kept")
        assert confirmed | set(after) == set(synced_pair.load.written)
        assert len(before) == len(confirmed)
        assert after == sorted(set(after))


@pytest.mark.long
@pytest.mark.parametrize("major", ONE)
def test_11_a_standby_of_a_standby_is_refused_by_name(major: int, tmp_path: Path) -> None:
    with slot_stack(major, tmp_path) as synced_pair:
        pair = synced_pair.pair
        pair.make_slot("kept")
        with synced_pair.controller() as controller:
            synced_pair.until(controller, "READY", "kept")
        # A slot of the name that its own upstream has, and the primary too.
        for server in (pair.primary, pair.standby):
            rows(server, "SELECT pg_create_physical_replication_slot('far', true)")
        folder = pair.standby.folder.with_name("far")
        far = backup(pair.standby, folder, wal="stream")
        (far.data_dir / "standby.signal").unlink(missing_ok=True)
        follow(far, pair.standby.dsn(), primary_slot_name="far", hot_standby_feedback="on")
        try:
            far.start()
            with synced_pair.controller(FailoverCandidate("far", far.dsn(), "far")) as controller:

                def told() -> object:
                    report = controller.once(10)
                    assert report[STANDBY].ready
                    reasons = {each.reason for each in report["far"].transitions}
                    return report["far"].ready is False and reasons == {"cascading"}

                wait_for(told, 20, "it is refused")
            assert slot_names(far) == set()
        finally:
            far.destroy()


@pytest.mark.parametrize("itself", [True, False], ids=["as candidate", "as primary"])
@pytest.mark.parametrize("major", ONE)
def test_32_a_promotion_while_a_copy_is_being_proven(
    major: int, itself: bool, tmp_path: Path
) -> None:
    with slot_stack(major, tmp_path) as synced_pair:
        pair = synced_pair.pair
        early = psycopg.connect(pair.primary.dsn())
        pair.make_slot("kept")
        early.execute("INSERT INTO shop VALUES (100001, 'row-100001')")
        pair.on_primary(
            "CHECKPOINT", "SELECT pg_replication_slot_advance('kept', pg_current_wal_lsn())"
        )
        pair.catch_up()
        with synced_pair.controller() as controller:
            wait_for(
                lambda: (
                    controller.once(10)[STANDBY].transitions[0].after
                    in {CopyState.RESERVING, CopyState.PROVING}
                ),
                20,
                "it is being proven",
            )
        (unproven,) = slot_names(pair.standby)
        assert unproven.startswith("_tuskline_tmp_")
        pair.promote()
        early.close()
        assert slot_names(pair.standby) == {unproven}
        # What nobody may use is removed, and holds no WAL: on a primary that is the candidate itself, and on one whose
        # candidates are others, which may be away.
        candidates = synced_pair.plan().candidates
        if not itself:
            candidates = (FailoverCandidate("old", pair.primary.dsn(), "old"),)
        plan = SlotSyncPlan(pair.standby.dsn(), candidates, Selection(), tmp_path / "slots")
        with Controller(plan) as controller:
            (found,) = controller.once(10).rounds.values()
            assert found.ready is (True if itself else None)
        assert slot_names(pair.standby) == set()


@pytest.mark.long
@pytest.mark.parametrize("major", ONE)
def test_26_a_candidate_that_was_promoted_by_itself_is_not_ready(
    major: int, tmp_path: Path
) -> None:
    with slot_stack(major, tmp_path) as synced_pair:
        synced_pair.pair.make_slot("kept")
        with synced_pair.controller() as controller:
            synced_pair.until(controller, "READY", "kept")
            synced_pair.pair.promote(stop=None)
            report = controller.once(10)[STANDBY]
            assert [(each.slot, each.reason) for each in report.transitions] == [
                ("kept", "promoted")
            ]
            assert report.ready is False
        # Its slot is its own now, and nobody touches it.
        assert slot_names(synced_pair.pair.standby) == {"kept"}


@pytest.mark.parametrize("major", ONE)
def test_20_an_old_primary_comes_back_as_a_candidate(major: int, tmp_path: Path) -> None:
    with slot_stack(major, tmp_path) as synced_pair:
        pair = synced_pair.pair
        pair.make_slot("kept")
        plan = both(synced_pair)
        with Controller(plan) as controller:
            until(controller, synced_pair, STANDBY, server=None)
            assert controller.once(10)["old"].ready
        pair.promote(stop="fast")
        rows(pair.standby, "SELECT pg_create_physical_replication_slot('old', true)")
        follow(pair.primary, pair.standby.dsn(), primary_slot_name="old", hot_standby_feedback="on")
        pair.primary.start()
        assert slot_names(pair.primary) == {"kept"}
        # It is the slot itself, and no copy: whoever was promoted now would not go on from what the other is at.
        assert probe(plan)["old"].ready is False
        with Controller(plan) as controller:
            report = controller.once(10)
            assert report[STANDBY].ready
            until(controller, synced_pair, "old", server=pair.standby)
        # It is a copy now, and what is written goes through it.
        rows(pair.standby, "INSERT INTO shop VALUES (700, 'row-700') RETURNING id")
        end = rows(pair.standby, "SELECT pg_current_wal_lsn()::text")[0][0]
        replayed = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
        wait_for(lambda: rows(pair.primary, replayed, end)[0][0], 20, "it has replayed")
        assert inspect(pair.primary, "kept")["snapshot_present"]
        assert decoded(pair.standby, "kept")[-1] == 700


def both(synced_pair: SlotStack) -> SlotSyncPlan:
    """Both servers as candidates; the primary is the one that takes writes."""
    first, second = (
        conninfo_to_dict(each.dsn())
        for each in (synced_pair.pair.primary, synced_pair.pair.standby)
    )
    either = make_conninfo(
        "",
        **{
            **first,
            "host": "127.0.0.1,127.0.0.1",
            "port": f"{first['port']},{second['port']}",
            "target_session_attrs": "read-write",
        },
    )
    others = (FailoverCandidate("old", synced_pair.pair.primary.dsn(), "old"),)
    return SlotSyncPlan(
        either,
        (*synced_pair.plan().candidates, *others),
        Selection(),
        synced_pair.folder / "slots",
        poll=0.1,
    )


def until(controller: Controller, synced_pair: SlotStack, name: str, server: object) -> None:
    """Rounds until the candidate is ready, while the slot is read and moves on."""
    where = synced_pair.pair.primary if server is None else synced_pair.pair.standby

    def ready() -> bool:
        rows(where, "INSERT INTO shop SELECT coalesce(max(id), 0) + 1, 'x' FROM shop")
        rows(where, "CHECKPOINT")
        rows(where, "SELECT pg_replication_slot_advance('kept', pg_current_wal_lsn())")
        return bool(controller.once(10)[name].ready)

    wait_for(ready, 60, f"{name} is ready")


@pytest.mark.parametrize("major", ONE)
def test_31_a_slot_from_a_backup_is_named_and_not_used(major: int, tmp_path: Path) -> None:
    with slot_stack(major, tmp_path) as synced_pair:
        pair = synced_pair.pair
        pair.make_slot("kept")
        pair.primary.stop()
        pair.standby.stop()
        # As a snapshot of the disk or rsync would bring it.
        source = pair.primary.data_dir / "pg_replslot" / "kept"
        target = pair.standby.data_dir / "pg_replslot" / "kept"
        pair.standby._account.run(["cp", "-Rp", source, target])
        pair.primary.start()
        pair.standby.start()
        pair.catch_up()
        with synced_pair.controller() as controller:
            for _ in range(5):
                synced_pair.turn_over("kept")
                pair.catch_up()
                report = controller.once(10)[STANDBY]
                assert [each.after for each in report.transitions] == [CopyState.STALE_BACKUP]
            assert not report.ready
            assert "pg_drop_replication_slot('kept')" in report.transitions[0].repair
            pair.on_standby("SELECT pg_drop_replication_slot('kept')")
            synced_pair.until(controller, "READY", "kept")


def fill_wal(synced_pair: SlotStack, segments: int = 6) -> None:
    for _ in range(segments):
        synced_pair.load.write()
        synced_pair.pair.on_primary("SELECT pg_switch_wal()")


def keep_little(server: object) -> None:
    for statement in (
        "ALTER SYSTEM SET max_slot_wal_keep_size = '40MB'",
        "ALTER SYSTEM SET wal_keep_size = 0",
        "SELECT pg_reload_conf()",
    ):
        rows(server, statement)  # type: ignore[arg-type]


@pytest.mark.parametrize("major", ONE)
def test_8_and_23_lost_slots_on_either_side(major: int, tmp_path: Path) -> None:
    with slot_stack(major, tmp_path) as synced_pair:
        pair = synced_pair.pair
        pair.make_slot("kept")
        pair.make_slot("lost")
        with synced_pair.controller() as controller:
            synced_pair.until(controller, "READY", "kept", "lost")
            # 8: the standby lets go of what its copies need.
            keep_little(pair.standby)
            fill_wal(synced_pair)
            pair.on_primary("CHECKPOINT")
            pair.catch_up()
            rows(pair.standby, "CHECKPOINT")
            assert inspect(pair.standby, "kept")["invalidation"] == "wal_removed"
            report = probe(synced_pair.plan())[STANDBY]
            assert {each.after for each in report.transitions} == {CopyState.INVALID}
            rows(pair.standby, "ALTER SYSTEM RESET ALL")
            rows(pair.standby, "SELECT pg_reload_conf()")
            synced_pair.until(controller, "READY", "kept", "lost")
            # 23: the primary loses a slot that nobody reads; the other goes on.
            keep_little(pair.primary)
            for _ in range(6):
                fill_wal(synced_pair, 1)
                synced_pair.turn_over("kept")
            status = "SELECT wal_status FROM pg_replication_slots WHERE slot_name = 'lost'"
            assert rows(pair.primary, status) == [("lost",)]
            report = synced_pair.until(controller, "READY", "kept")
            lost = next(each for each in report.transitions if each.slot == "lost")
            assert (lost.after, lost.reason) == (CopyState.INVALID, "lost_on_primary")
            assert lost.repair


@pytest.mark.parametrize("major", ONE)
def test_50_a_slot_that_is_made_anew_under_its_name_is_another_one(
    major: int, tmp_path: Path
) -> None:
    """Its client has begun anew, with all that was committed then, and would get that again from the old slot's copy."""
    with slot_stack(major, tmp_path) as stack:
        pair = stack.pair
        pair.make_slot("kept")
        with stack.controller() as controller:
            stack.until(controller, "READY", "kept")
            rows(pair.standby, "SELECT pg_wal_replay_pause()")
            stack.load.write(3)
            pair.on_primary("SELECT pg_drop_replication_slot('kept')")
            pair.make_slot("kept")
            begun = stack.load.written[-1]
            stack.load.write()
            for _ in range(3):
                found = stack.found(controller, "kept")
                assert (found.after, found.reason) == (CopyState.SUSPECT, "other_incarnation")
            rows(pair.standby, "SELECT pg_wal_replay_resume()")
            stack.until(controller, "READY", "kept")
        pair.promote()
        assert [each for each in decoded(pair.standby, "kept") if each <= begun] == []
