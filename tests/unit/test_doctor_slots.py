"""What doctor says of a primary and its failover candidates as hosts of logical slots."""

import contextlib
import socket
import time

import pytest

from walsender_bridge.cli.doctor import _script
from walsender_bridge.doctor import slots, wal_room
from walsender_bridge.doctor.finding import Severity
from walsender_bridge.errors import Cause

PHYSICAL = "standby_a"
LOGICAL = {
    "slot_name": "app",
    "slot_type": "logical",
    "plugin": "pgoutput",
    "temporary": False,
    "active": False,
}


def facts(**other):
    good = {
        "version": 160_009,
        "version_text": "16.9",
        "database": "shop",
        "in_recovery": False,
        "system_id": "7",
        "settings": {
            "wal_level": "logical",
            "max_replication_slots": "10",
            "hot_standby_feedback": "on",
            "primary_slot_name": PHYSICAL,
            "wal_receiver_status_interval": "1",
        },
        "disk": {"local": False, "folder": None, "kept": 0, "free": None},
        "conninfo_dbname": None,
        "receiver_slot": PHYSICAL,
        "receiver_status": "streaming",
        "slots": [
            LOGICAL,
            {"slot_name": PHYSICAL, "slot_type": "physical", "temporary": False, "active": True},
        ],
        "role": {"name": "keeper", "superuser": False, "replication": True, "sees": True},
        "extension": {"usable": True, "version": "0.1"},
        "available": "0.1",
    }
    return {**good, **other}


def standby(**other):
    settings = {**facts()["settings"], **other.pop("settings", {})}
    return facts(**{"in_recovery": True, "slots": [], "settings": settings, **other})


def bad(found):
    return {each.check: each for each in found if each.severity is not Severity.OK}


def of_primary(**other):
    return bad(slots.evaluate_primary(facts(**other), {PHYSICAL}, "db"))


def of_standby(**other):
    return bad(slots.evaluate_standby(standby(**other), facts(), PHYSICAL, "db"))


def test_good_servers_are_good():
    assert of_primary() == {}
    assert of_standby() == {}
    assert of_standby(settings={"output_plugin_libraries": 'test_decoding, "pgoutput"'}) == {}


SETTINGS = [
    ({"wal_level": "replica"}, "wal_level", "logical slots require logical"),
    ({"hot_standby_feedback": "off"}, "hot_standby_feedback", "may remove catalog rows"),
    (
        {"wal_receiver_status_interval": "0"},
        "hot_standby_feedback",
        "sends no feedback to the primary",
    ),
    ({"primary_slot_name": "other"}, "primary_slot_name", "[slots] names standby_a"),
    ({"max_replication_slots": "1"}, "max_replication_slots", "too few"),
    ({"output_plugin_libraries": "test_decoding, tuskline"}, "output_plugin_libraries", "pgoutput"),
    ({"output_plugin_libraries": ""}, "output_plugin_libraries", "pgoutput"),
]


@pytest.mark.parametrize(("settings", "check", "text"), SETTINGS)
def test_10_each_setting_of_a_standby_is_named_with_its_repair(settings, check, text):
    found = of_standby(settings=settings)
    assert [*found] == [check]
    assert found[check].severity is Severity.ERROR
    assert text in found[check].what
    assert found[check].repair
    assert not found[check].prevents


CASES = [
    ({"receiver_slot": None, "settings": {"primary_slot_name": ""}}, "primary_slot_name", "empty"),
    ({"extension": None}, "extension", "is not installed in database shop"),
    ({"extension": {"usable": False, "version": "0.1"}}, "extension", "may not call"),
    ({"extension": {"usable": True, "version": "0.0"}}, "extension", "0.1 is available"),
    ({"system_id": "8"}, "standby", "another cluster"),
    ({"version": 160_008, "version_text": "16.8"}, "minor version", "too early"),
    ({"version": 120_022, "version_text": "12.22"}, "minor version", "no minor of 12 fixes that"),
    (
        {"settings": {"sync_replication_slots": "on"}, "conninfo_dbname": False},
        "primary_conninfo",
        "has no dbname",
    ),
]


@pytest.mark.parametrize(("other", "check", "text"), CASES)
def test_10_what_a_standby_lacks_is_named_with_its_repair(other, check, text):
    found = of_standby(**other)
    assert [*found] == [check]
    assert text in found[check].what
    assert found[check].repair


def test_10_a_role_that_lacks_something_is_told_the_grant():
    role = {"name": "keeper", "superuser": False, "replication": False, "sees": False}
    found = [
        each
        for each in slots.evaluate_standby(standby(role=role), facts(), PHYSICAL, "db")
        if each.severity is Severity.ERROR
    ]
    assert [each.cause for each in found] == [Cause.PRIVILEGE, Cause.PRIVILEGE]
    assert "REPLICATION" in found[0].repair
    assert "pg_read_all_stats" in found[1].repair


@pytest.mark.parametrize(
    ("other", "statement"),
    [
        ({"extension": None}, "CREATE EXTENSION tuskline;"),
        ({"extension": None, "database": "other"}, ""),  # the script is in the primary's
        ({"extension": None, "available": None}, ""),
        ({"extension": {"usable": False, "version": "0.1"}}, 'GRANT tuskline_slots TO "keeper";'),
        ({"extension": {"usable": True, "version": "0.0"}}, "ALTER EXTENSION tuskline UPDATE;"),
        ({"extension": {"usable": True}, "extension_stranger": "eve"}, ""),
    ],
)
def test_what_sql_can_repair_on_the_primary_is_in_the_script(other, statement):
    assert of_standby(**other)["extension"].fix == statement


def test_a_missing_physical_slot_is_made_by_the_script():
    made = "SELECT pg_create_physical_replication_slot('standby_a', true);"
    assert of_primary(slots=[LOGICAL])["physical slot"].fix == made


def test_10_the_script_has_each_statement_once_and_connects_where_there_are_several_servers():
    role = {"name": 'kee"per', "superuser": False, "replication": False, "sees": False}
    told = [*slots.evaluate_standby(standby(role=role), facts(), PHYSICAL, "db")]
    of_slots = ("copies of slots", "host=a user=me password=secret dbname=shop", told * 2)
    alone = _script([of_slots])
    assert alone.count('ALTER ROLE "kee""per" REPLICATION;') == 1
    assert "\\connect" not in alone
    both = _script([("source shop", "service=shop", told), of_slots, ("source none", "", [])])
    connects = [line for line in both.splitlines() if line.startswith("\\connect")]
    assert connects == [
        "\\connect -reuse-previous=off 'service=shop'",
        "\\connect -reuse-previous=on 'dbname=shop host=a'",
    ]
    assert "secret" not in both


def test_15_a_physical_slot_that_is_missing_or_idle_is_shown_by_its_name():
    assert "standby_a" in of_primary(slots=[LOGICAL])["physical slot"].what
    idle = {"slot_name": PHYSICAL, "slot_type": "physical", "temporary": False, "active": False}
    assert "standby_a is not active" in of_primary(slots=[idle])["physical slot"].what
    lost = {**idle, "active": True, "wal_status": "lost"}
    assert "is lost" in of_primary(slots=[lost])["physical slot"].what


def test_native_synchronization_asks_for_the_extension_too():
    native = {"settings": {"sync_replication_slots": "on"}, "conninfo_dbname": True}
    assert of_standby(**native) == {}
    assert [*of_standby(**native, extension=None)] == ["extension"]


def test_a_server_of_the_wrong_kind_is_named():
    assert "standby" in bad(
        slots.evaluate_standby(standby(in_recovery=False), facts(), PHYSICAL, "db")
    )
    assert "primary" in of_primary(in_recovery=True)


def test_candidates_that_hang_cost_one_time_out_together():
    """Nobody accepts on any of four addresses."""
    with contextlib.ExitStack() as stack:
        hung = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
        first, *others = (
            f"host=127.0.0.1 port={each.getsockname()[1]} user=x dbname=x connect_timeout=2"
            for each in hung
        )
        candidates = {f"standby-{n}": (dsn, f"slot_{n}") for n, dsn in enumerate(others)}
        began = time.monotonic()
        found = list(slots.examine(first, candidates))
        took = time.monotonic() - began
    assert [each.check for each in found] == ["connection"] * 4
    assert ["standby-0" in found[1].where, "standby-2" in found[3].where] == [True, True]
    assert took < 5


def test_40_a_server_that_invalidates_idle_slots_is_warned_of():
    timeout = {"idle_replication_slot_timeout": "60"}
    found = of_standby(settings=timeout)["idle_replication_slot_timeout"]
    assert found.severity is Severity.WARNING
    assert "60 s" in found.what
    assert "promotion" in found.what
    found = of_primary(settings={**facts()["settings"], **timeout})
    assert "physical slot" in found["idle_replication_slot_timeout"].what
    assert of_standby(settings={"idle_replication_slot_timeout": "0"}) == {}


@pytest.mark.parametrize(
    ("limit", "kept", "free", "bad"),
    [
        ("-1", 0, 0, False),
        ("100", 0, 100, False),
        ("100", 0, 99, True),
        ("100", 1, 99, False),
        ("100", 200, 0, False),
        ("100", 0, None, False),
    ],
)
def test_slots_may_keep_no_more_than_the_disk_holds(limit, kept, free, bad):
    disk = {
        "local": True,
        "folder": "/",
        "kept": kept << 20,
        "free": None if free is None else free << 20,
    }
    settings = {**facts()["settings"], "max_slot_wal_keep_size": limit}
    for found in (
        of_primary(settings=settings, disk=disk),
        of_standby(settings=settings, disk=disk),
    ):
        assert ([*found] == [wal_room.CHECK]) is bad
        assert not bad or "only 99 MB are free" in found[wal_room.CHECK].what


def test_free_space_is_known_of_this_machine_only(tmp_path):
    here = {"local": True, "folder": str(tmp_path), "kept": 0}
    assert (wal_room.free_bytes(here) or 0) > 0
    assert wal_room.free_bytes({**here, "local": False}) is None
    assert wal_room.free_bytes({**here, "folder": None}) is None
    assert wal_room.free_bytes({**here, "folder": str(tmp_path / "absent")}) is None
