"""What loses a slot's rows without a word, and what loses a slot: shown on real servers, with our copy beside it."""

import time
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from slot_sync.controller import Controller
from slot_sync.resolver.transitions import CopyState
from tests.support.extension import MAJORS, ONE
from tests.support.slot_copies import (
    MOVE,
    PUBLICATION,
    decoded,
    inspect,
    received,
    rows,
    slot_names,
)
from tests.support.slot_sync import STANDBY, SlotStack, slot_stack
from tests.support.waiting import wait_for
from tests.support.wal_server import backup, follow
from walsender_bridge.demo.local_server import LocalServer

NATIVE = [each for each in MAJORS if isinstance(each.values[0], int) and each.values[0] >= 17]


@pytest.mark.parametrize("major", ONE)
def test_18_a_copy_of_positions_loses_rows_and_the_controllers_does_not(
    major: int, tmp_path: Path
) -> None:
    """Fact 1. At the copied restart_lsn another transaction ran, and no decoder of this standby has been there.

    What a decoder of the standby sees, it saves for every slot there: so the controller looks away for that while, and
    its copy stays where it was proven.
    """
    with slot_stack(major, tmp_path) as synced_pair:
        pair = synced_pair.pair
        pair.make_slot("kept")
        with synced_pair.controller() as controller:
            synced_pair.until(controller, "READY", "kept")
            with (
                psycopg.connect(pair.primary.dsn()) as early,
                psycopg.connect(pair.primary.dsn()) as late,
            ):
                early.execute("INSERT INTO shop VALUES (100100, 'row-100100')")
                pair.on_primary(*MOVE)
                for number in (101, 102, 103):
                    late.execute(f"INSERT INTO shop VALUES ({number}, 'row-{number}')".encode())
                early.commit()
                pair.on_primary(*MOVE, *MOVE)
                pair.reserve("_tuskline_tmp_positions", "kept")
                same = pair.slot("kept")
                assert inspect(pair.standby, "_tuskline_tmp_positions")["restart_lsn"] == (
                    same.restart_lsn
                )
                late.commit()
            pair.on_primary("CHECKPOINT", "INSERT INTO shop VALUES (104, 'row-104')")
            pair.catch_up()
        wanted = [101, 102, 103, 104]
        assert decoded(pair.primary, "kept") == wanted
        pair.promote()
        lost = set(wanted) - set(decoded(pair.standby, "_tuskline_tmp_positions"))
        found = decoded(pair.standby, "kept")
        print(f"positions alone: {sorted(lost)} lost; ours: {found}")
        assert lost == {101, 102, 103}
        assert [each for each in found if each in wanted] == wanted
        assert received(pair.standby, "kept") == found


@pytest.mark.parametrize("major", NATIVE)
def test_30_an_open_transaction_loses_a_native_copy_and_not_ours(
    major: int, tmp_path: Path
) -> None:
    """Two standbys of one primary, and two slots that are the same but for who keeps them.

    PostgreSQL's worker sleeps for up to 30 s where nothing happens. If a transaction begins meanwhile, its copy waits for
    the slot's catalog_xmin to pass what the standby had then, and so for the end of the transaction.
    """
    with slot_stack(major, tmp_path) as synced_pair:
        pair = synced_pair.pair
        pair.on_primary("SELECT pg_create_physical_replication_slot('far', true)")
        far = backup(pair.primary, pair.standby.folder.with_name("far"), wal="fetch")
        follow(far, pair.primary.dsn(), primary_slot_name="far", hot_standby_feedback="on")
        try:
            far.start()
            _pinned(synced_pair, far)
        finally:
            far.destroy()


def _pinned(synced_pair: SlotStack, far: LocalServer) -> None:
    pair = synced_pair.pair
    pair.on_primary(
        "SELECT pg_create_logical_replication_slot('native', 'pgoutput', false, false, true)"
    )
    pair.make_slot("ours")
    with (
        synced_pair.controller(names=frozenset({"ours"})) as controller,
        closing(psycopg.connect(pair.primary.dsn())) as pinning,
    ):
        synced_pair.until(controller, "READY", "ours")
        synced_pair.turn_over("native", "ours")
        pinning.execute("INSERT INTO shop VALUES (100001, 'row-100001')")
        synced_pair.load.write(3)
        rows(far, "ALTER SYSTEM SET sync_replication_slots = on")
        rows(far, "SELECT pg_reload_conf()")
        wait_for(lambda: slot_names(far) == {"native"}, 60, "PostgreSQL has begun with its own")
        # It tries every few hundred milliseconds, and the clients read on.
        end = time.monotonic() + 4
        while time.monotonic() < end:
            synced_pair.turn_over("native", "ours")
            pair.catch_up()
            copy = inspect(far, "native")
            assert (copy["synced"], copy["persistency"]) == (True, "temporary")
            (ours,) = controller.once(10)[STANDBY].expected
            assert ours.after is CopyState.READY
        synced_pair.load.write(3)
        expected = decoded(pair.primary, "ours")
        assert len(expected) == 3
        assert decoded(pair.primary, "native") == expected
        pair.catch_up()
        pair.promote()
    far._account.run([far.installation.tool("pg_ctl"), "promote", "-w", "-D", far.data_dir])
    assert slot_names(far) == set()
    assert slot_names(pair.standby) == {"ours"}
    found = decoded(pair.standby, "ours")
    assert found[-3:] == expected
    assert received(pair.standby, "ours") == found


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
@pytest.mark.parametrize("major", ONE)
def test_12_a_copy_begun_during_an_open_transaction_needs_a_snapshot(
    major: int, beside: bool, tmp_path: Path
) -> None:
    """What the transaction did before, no decoder of the standby knows; unless another copy's has followed since then."""
    with slot_stack(major, tmp_path) as synced_pair:
        pair = synced_pair.pair
        pair.make_slot("kept")
        pair.make_slot("other")
        first = frozenset({"other"}) if beside else frozenset[str]()
        with closing(psycopg.connect(pair.primary.dsn())) as early:
            if beside:
                with synced_pair.controller(names=first) as controller:
                    synced_pair.until(controller, "READY", "other")
            early.execute("INSERT INTO shop VALUES (100001, 'row-100001')")
            synced_pair.turn_over("kept", "other")
            synced_pair.turn_over("kept", "other")
            pair.catch_up()
            with synced_pair.controller(names=frozenset({"kept", *first})) as controller:
                if beside:
                    synced_pair.until(controller, "READY", "kept", "other")
                else:
                    _stays_unproven(synced_pair, controller)
            synced_pair.load.write(2)
            pair.catch_up()
            expected = decoded(pair.primary, "kept")
            pair.promote()
        if beside:
            assert decoded(pair.standby, "kept")[-2:] == expected[-2:]
        else:
            assert all(name.startswith("_tuskline_tmp_") for name in slot_names(pair.standby))


def _stays_unproven(synced_pair: SlotStack, controller: Controller) -> None:
    """Until the transaction ends, whatever the slot's client reads."""

    def reason() -> str:
        synced_pair.turn_over("kept")
        synced_pair.pair.catch_up()
        (found,) = controller.once(10)[STANDBY].expected
        assert not found.safe
        return str(found.reason)

    wait_for(lambda: reason() == "no_snapshot", 60, "nothing else is lacking")
    assert {reason() for _ in range(5)} == {"no_snapshot"}


@pytest.mark.parametrize("major", ONE)
def test_12_a_copy_begun_during_a_transaction_is_ready_if_the_slot_is_behind_its_beginning(
    major: int, tmp_path: Path
) -> None:
    """A record of what runs names no transaction, and the next one is before this one, too: it is decoded whole."""
    with slot_stack(major, tmp_path) as stack:
        pair = stack.pair
        pair.on_primary("CREATE TABLE late (id bigint PRIMARY KEY, note text)")
        pair.make_slot("kept")
        for _ in range(2):
            stack.load.write()
            pair.on_primary("CHECKPOINT")
        with closing(psycopg.connect(pair.primary.dsn())) as early:
            early.execute("INSERT INTO shop VALUES (100001, 'row-100001')")
            early.execute("SAVEPOINT inside")
            early.execute(f"ALTER PUBLICATION {PUBLICATION} ADD TABLE late".encode())
            early.execute("RELEASE inside")
            early.execute("INSERT INTO late VALUES (100002, 'row-100002')")
            pair.catch_up()
            with stack.controller() as controller:
                stack.until(controller, "READY", "kept")
            early.commit()
        pair.on_primary("INSERT INTO late VALUES (100003, 'row-100003')")
        pair.catch_up()
        wanted = [100001, 100002, 100003]
        assert decoded(pair.primary, "kept") == wanted
        pair.promote()
        assert [each for each in decoded(pair.standby, "kept") if each > 100000] == wanted
