"""What happens to copies when servers restart, crash, lose their settings or are away; one pair, brought back each time."""

import time
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from slot_sync.controller import Controller, probe
from slot_sync.plan import FailoverCandidate
from slot_sync.resolver.transitions import CopyState
from tests.support.slot_copies import PHYSICAL, inspect, rows, slot_names
from tests.support.slot_sync import STANDBY, SlotStack, attached
from tests.support.waiting import wait_for
from walsender_bridge.doctor import slots as doctor
from walsender_bridge.doctor.wal_room import CHECK
from walsender_bridge.errors import Cause


def until_ready(synced_pair: SlotStack, controller: Controller, *names: str) -> list[CopyState]:
    """The states of the first name until all are ready."""
    seen: list[CopyState] = []
    deadline = time.monotonic() + 60
    while True:
        report = controller.once(10)[STANDBY]
        found = {each.slot: each for each in report.transitions}
        if names[0] in found:
            seen.append(found[names[0]].after)
        if all(name in found and found[name].safe for name in names):
            return seen
        assert time.monotonic() < deadline, seen
        synced_pair.turn_over(*names)


def configure(synced_pair: SlotStack, name: str, value: str | None) -> None:
    """Set a setting of the standby, or set it back, and wait until it holds."""
    what = (
        f"ALTER SYSTEM SET {name} = '{value}'"
        if value is not None
        else f"ALTER SYSTEM RESET {name}"
    )
    with psycopg.connect(synced_pair.pair.standby.dsn(), autocommit=True) as connection:
        before = connection.execute("SELECT pg_conf_load_time()").fetchone()
        connection.execute(what.encode())
        connection.execute("SELECT pg_reload_conf()")
    wait_for(
        lambda: rows(synced_pair.pair.standby, "SELECT pg_conf_load_time()")[0] != before,
        10,
        "reloaded",
    )


def change_catalogs(synced_pair: SlotStack) -> None:
    """Leave dead rows in the catalogs, and have them removed as far as anybody allows."""
    synced_pair.pair.on_primary(
        *(f"CREATE TABLE passing_{n} (id int)" for n in range(5)),
        *(f"DROP TABLE passing_{n}" for n in range(5)),
        "VACUUM pg_class",
        "VACUUM pg_attribute",
    )


def test_3_servers_restart_and_copies_are_ready_again(
    synced_pair: SlotStack, controller: Controller
) -> None:
    synced_pair.pair.make_slot("kept")
    synced_pair.until(controller, "READY", "kept")
    for server in (synced_pair.pair.standby, synced_pair.pair.primary):
        server.restart()
        seen = until_ready(synced_pair, controller, "kept")
        assert seen[-1] is CopyState.READY
        assert CopyState.CONFLICT not in seen
    assert slot_names(synced_pair.pair.standby) == {"kept"}


@pytest.mark.parametrize("fault", ["dropped", "feedback", "crash"])
def test_19_a_gap_in_the_reservation_is_suspect_until_it_is_proven_again(
    synced_pair: SlotStack, controller: Controller, fault: str
) -> None:
    """Facts 2 and 3: the physical slot's values may be the same after it, and say nothing."""
    pair = synced_pair.pair
    pair.make_slot("kept")
    synced_pair.until(controller, "READY", "kept")
    if fault == "dropped":
        pair.standby.stop()
        pair.on_primary(f"SELECT pg_drop_replication_slot('{PHYSICAL}')")
        change_catalogs(synced_pair)
        pair.on_primary(f"SELECT pg_create_physical_replication_slot('{PHYSICAL}', true)")
        pair.standby.start()
    elif fault == "feedback":
        configure(synced_pair, "hot_standby_feedback", "off")
        wait_for(
            lambda: inspect(pair.primary, PHYSICAL)["catalog_xmin"] is None, 20, "it holds nothing"
        )
        change_catalogs(synced_pair)
        report = controller.once(10)[STANDBY]
        assert [each.reason for each in report.transitions] == ["feedback_off"]
        assert "hot_standby_feedback = on" in report.transitions[0].repair
        configure(synced_pair, "hot_standby_feedback", None)
    else:
        pair.primary.kill()
        pair.primary.start()
    synced_pair.load.write(3)
    seen = until_ready(synced_pair, controller, "kept")
    assert seen[0] in {CopyState.SUSPECT, CopyState.BLOCKED}, seen
    assert seen[-1] is CopyState.READY
    # What its client has not read is all there.
    synced_pair.load.write(3)
    pair.catch_up()
    assert controller.once(10)[STANDBY].ready


def test_15_a_physical_slot_that_nobody_uses_is_shown_by_its_name(
    synced_pair: SlotStack, controller: Controller
) -> None:
    synced_pair.pair.make_slot("kept")
    synced_pair.until(controller, "READY", "kept")
    configure(synced_pair, "primary_conninfo", "host=127.0.0.1 port=1")
    wait_for(
        lambda: not rows(synced_pair.pair.primary, "SELECT FROM pg_stat_replication"),
        20,
        "it is away",
    )
    report = controller.once(10)[STANDBY]
    assert not report.ready
    assert report.transitions[0].reason == "not_streaming"
    candidates = {STANDBY: (synced_pair.pair.standby.dsn(), PHYSICAL)}
    told = [each.what for each in doctor.examine(synced_pair.pair.primary.dsn(), candidates)]
    assert any(f"{PHYSICAL} is not active" in what for what in told)
    configure(synced_pair, "primary_conninfo", None)
    until_ready(synced_pair, controller, "kept")


def test_10_a_candidate_without_a_slot_name_is_told_so(
    synced_pair: SlotStack, controller: Controller
) -> None:
    synced_pair.pair.make_slot("kept")
    synced_pair.until(controller, "READY", "kept")
    configure(synced_pair, "primary_slot_name", "")
    report = controller.once(10)[STANDBY]
    assert [each.reason for each in report.transitions] == ["no_slot_name"]
    assert "primary_slot_name" in report.transitions[0].repair
    candidates = {STANDBY: (synced_pair.pair.standby.dsn(), PHYSICAL)}
    found = {
        each.check: each for each in doctor.examine(synced_pair.pair.primary.dsn(), candidates)
    }
    assert found["primary_slot_name"].cause is Cause.SERVER_SETTING
    configure(synced_pair, "primary_slot_name", None)
    until_ready(synced_pair, controller, "kept")


def test_33_a_standby_that_applies_late_is_behind_and_not_wrong(
    synced_pair: SlotStack, controller: Controller
) -> None:
    synced_pair.pair.make_slot("kept")
    synced_pair.until(controller, "READY", "kept")
    configure(synced_pair, "recovery_min_apply_delay", "1h")
    wait_for(lambda: controller.once(10)[STANDBY].ready, 20, "it is proven again")
    # Who looks by a session of its own sees the reload as the controller does.
    assert probe(synced_pair.plan())[STANDBY].ready
    synced_pair.load.write(3)
    synced_pair.pair.make_slot("new")
    synced_pair.consume("kept")
    report = controller.once(10)[STANDBY]
    found = {each.slot: each for each in report.transitions}
    assert found["new"].after is CopyState.MISSING
    assert found["new"].reason == "ahead_of_standby"
    # What its client has read already it would be sent again: whole transactions, none is lacking.
    assert found["kept"].safe
    configure(synced_pair, "recovery_min_apply_delay", None)
    until_ready(synced_pair, controller, "kept", "new")


def test_10_a_neighbor_of_the_candidate_is_told_by_its_slot(synced_pair: SlotStack) -> None:
    """The DSN of one standby with the slot of another: what is done would be done to the wrong server."""
    synced_pair.pair.make_slot("kept")
    plan = replace(
        synced_pair.plan(),
        candidates=(FailoverCandidate("far", synced_pair.pair.standby.dsn(), "far"),),
    )
    with Controller(plan) as controller:
        report = controller.once(10)["far"]
    (found,) = report.transitions
    assert (found.reason, report.ready) == ("other_slot_name", False)
    assert PHYSICAL in found.why
    assert slot_names(synced_pair.pair.standby) == set()


def test_27_ready_with_the_primary_down_answers_from_what_was_proven(
    synced_pair: SlotStack, controller: Controller, tmp_path: Path
) -> None:
    pair = synced_pair.pair
    pair.make_slot("kept")
    with attached(synced_pair, tmp_path, max_age=600) as tuskline:
        synced_pair.folder = tmp_path / "log"
        with synced_pair.controller() as own:
            controller.close()
            synced_pair.until(own, "READY", "kept")
            own.once(10)
        assert tuskline.json("slots", "ready", "--standby", STANDBY)["ready"] is True
        pair.primary.stop()
        told = tuskline.json("slots", "ready", "--standby", STANDBY)
        (slot,) = told["slots"]
        assert (slot["state"], slot["reason"]) == ("READY", "proven_before")
        assert 0 < slot["age"] < 60
        assert "the primary does not answer" in told["problems"][0]
        # Somebody reads from it: who goes on from there would not get what that one got.
        pair.on_standby("SELECT pg_replication_slot_advance('kept', pg_last_wal_replay_lsn())")
        told = tuskline.json("slots", "ready", "--standby", STANDBY, code=1)
        assert told["slots"][0]["state"] == "SUSPECT"
        assert "it is ahead" in told["slots"][0]["why"]
        # Something has happened since: what was proven may not hold any more.
        configure(synced_pair, "wal_receiver_status_interval", "2s")
        told = tuskline.json("slots", "status", code=1)
        assert told["slots"][0]["state"] == "SUSPECT"
        pair.standby.stop()
        assert tuskline.json("slots", "status", code=2)["ready"] is None
        pair.standby.start()
        configure(synced_pair, "wal_receiver_status_interval", None)
        pair.primary.start()
    pair.catch_up()


def test_44_an_answer_without_the_primary_has_an_age_and_says_what_is_not_known(
    synced_pair: SlotStack, controller: Controller, tmp_path: Path
) -> None:
    """A slot that was made while no controller looked is in no record: nobody can say that it has no copy."""
    pair = synced_pair.pair
    pair.make_slot("kept")
    with attached(synced_pair, tmp_path, max_age=600) as tuskline:
        synced_pair.folder = tmp_path / "log"
        controller.close()
        with synced_pair.controller() as own:
            synced_pair.until(own, "READY", "kept")
            own.once(10)
        pair.make_slot("unseen")
        ask = ("slots", "ready", "--standby", STANDBY)
        assert tuskline.json(*ask, code=1)["not_known"] == []
        pair.primary.stop("immediate")
        told = tuskline.json(*ask)
        assert [each["slot"] for each in told["slots"]] == ["kept"]
        assert any("slots that were created" in word for word in told["not_known"])
        assert any("clients have confirmed" in word for word in told["not_known"])
        assert told["slots"][0]["not_known"]
        assert "slots that were created" in tuskline.run(*ask).stderr
        told = tuskline.json(*ask, "--max-age", "0.001", code=2)
        assert (told["ready"], told["slots"][0]["reason"]) == (None, "proven_long_ago")
        assert tuskline.json("slots", "status", "--max-age", "0", code=2)["ready"] is None
        pair.primary.start()
    pair.catch_up()


POINTS = [
    *("after-reserve", "after-advance", "after-rename"),
    *(pytest.param(each, marks=pytest.mark.long) for each in ("before-reserve", "before-rename")),
]


@pytest.mark.parametrize("point", POINTS)
def test_4_a_controller_may_be_killed_anywhere(
    synced_pair: SlotStack, tmp_path: Path, point: str
) -> None:
    pair = synced_pair.pair
    pair.make_slot("kept")
    with attached(synced_pair, tmp_path) as tuskline:
        synced_pair.folder = tmp_path / "log"
        killed = {"TUSKLINE_FAIL_POINT": f"slots-{point}"}

        def dies() -> bool:
            synced_pair.turn_over("kept")
            pair.catch_up()
            return tuskline.run("slots", "sync", "--once", env=killed).returncode == -9

        wait_for(dies, 60, f"it dies at {point}")
        with synced_pair.controller() as controller:
            synced_pair.until(controller, "READY", "kept")
        assert slot_names(pair.standby) == {"kept"}


def test_18_status_and_sync_of_the_command_line(synced_pair: SlotStack, tmp_path: Path) -> None:
    pair = synced_pair.pair
    pair.make_slot("kept")
    pair.make_slot("other")
    with attached(synced_pair, tmp_path, names=["kept"]) as tuskline:
        assert tuskline.json("slots", "status", code=1)["ready"] is False
        assert tuskline.error("slots", "ready", "--standby", "far", code=Cause.CONFIG)["repair"]
        assert tuskline.error("slots", "sync", code=Cause.USAGE)["repair"]

        def synced() -> bool:
            synced_pair.turn_over("kept", "other")
            pair.catch_up()
            return tuskline.run("slots", "sync", "--once").returncode == 0

        wait_for(synced, 60, "it is ready")
        told = tuskline.json("slots", "status")
        assert [(each["slot"], each["state"]) for each in told["slots"]] == [("kept", "READY")]
        assert "READY" in tuskline.run("slots", "ready", "--standby", STANDBY).stdout
        file = tuskline.config.read_text()
        tuskline.config.write_text(file.replace('"kept"', '"kept", "missspelt"'))
        told = tuskline.json("slots", "ready", "--standby", STANDBY, code=1)
        reasons = {each["slot"]: each["reason"] for each in told["slots"]}
        assert reasons == {"kept": "proven", "missspelt": "no_such_slot"}
    assert slot_names(pair.standby) == {"kept"}
    synced_pair.folder = tmp_path / "log"
    assert probe(synced_pair.plan(names=frozenset({"kept"}))).ready


def test_45_slots_that_may_keep_more_than_the_disk_holds_are_told(synced_pair: SlotStack) -> None:
    pair = synced_pair.pair
    if pair.major < 13:
        pytest.skip("no limit before 13")
    candidates = {STANDBY: (pair.standby.dsn(), PHYSICAL)}
    for server in (pair.primary, pair.standby):
        rows(server, "ALTER SYSTEM SET max_slot_wal_keep_size = '2000TB'")
        rows(server, "SELECT pg_reload_conf()")

    def told() -> list[str]:
        found = doctor.examine(pair.primary.dsn(), candidates)
        return [each.where.split()[0] for each in found if each.check == CHECK and each.repair]

    wait_for(lambda: told() == ["slots", "candidate"], 10, "both are named")
