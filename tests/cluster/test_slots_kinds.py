"""Slots of several kinds, and hundreds of them; a role and a database that somebody has prepared against us."""

import shutil
import time
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from slot_sync.controller import Controller, probe
from slot_sync.plan import FailoverCandidate
from slot_sync.probe.primary import PrimaryProbe
from slot_sync.probe.standby import StandbyProbe
from tests.support import extension
from tests.support.slot_copies import PHYSICAL, Pair, inspect, rows, slot_names
from tests.support.slot_sync import STANDBY, SlotStack
from tests.support.waiting import wait_for
from walsender_bridge.demo.local_server import LocalServer
from walsender_bridge.doctor import slots as doctor
from walsender_bridge.doctor.finding import Finding, Severity


def do(server: LocalServer, dbname: str, *statements: str) -> None:
    with psycopg.connect(server.dsn(dbname), autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def until_ready(
    synced_pair: SlotStack, controller: Controller, databases: dict[str, str], seconds: float = 60
) -> None:
    """Move each slot (by its name: its database) on the primary, until all copies are ready."""
    moves: dict[str, list[str]] = {}
    for name, dbname in databases.items():
        move = f"SELECT pg_replication_slot_advance('{name}', pg_current_wal_lsn())"
        moves.setdefault(dbname, []).append(move)

    def ready() -> bool:
        synced_pair.load.write()
        synced_pair.pair.on_primary("CHECKPOINT")
        for dbname, statements in moves.items():
            do(synced_pair.pair.primary, dbname, *statements)
        synced_pair.pair.catch_up()
        found = controller.once(seconds)[STANDBY]
        return bool(found.ready) and {each.slot for each in found.expected} == set(databases)

    wait_for(ready, seconds, "all are ready")


def plugins_finding(pair: Pair, candidates: dict[str, tuple[str, str]]) -> Finding:
    """What doctor says of the plugins that the standby takes."""
    found = doctor.examine(pair.primary.dsn(), candidates)
    return next(each for each in found if each.check == "output_plugin_libraries")


def test_1_slots_of_two_plugins_and_of_several_databases(
    synced_pair: SlotStack, controller: Controller
) -> None:
    pair = synced_pair.pair
    # A second plugin: the one that is there, under another name.
    where = extension.pg_config(pair.major)
    assert where is not None
    folder = pair.primary._account.run([where, "--pkglibdir"]).strip()
    shutil.copyfile(f"{folder}/pgoutput.so", pair.library / "otherput.so")
    (pair.library / "otherput.so").chmod(0o755)
    for server in (pair.primary, pair.standby):
        rows(server, f"ALTER SYSTEM SET dynamic_library_path = '$libdir:{pair.library}'")
        if extension.lists_plugins(pair.major):
            rows(server, "ALTER SYSTEM SET output_plugin_libraries = pgoutput, otherput")
        rows(server, "SELECT pg_reload_conf()")
    pair.make_slot("plain")
    pair.on_primary("CREATE DATABASE second")
    extension.create_extension(pair.primary, pair.library, "second")

    def made() -> bool:
        try:
            do(
                pair.primary,
                "second",
                "SELECT pg_create_logical_replication_slot('elsewhere', 'otherput')",
            )
        except psycopg.errors.UndefinedFile:
            return False
        return True

    wait_for(made, 10, "the server has its new path")
    until_ready(synced_pair, controller, {"plain": "postgres", "elsewhere": "second"})
    if extension.lists_plugins(pair.major):
        candidates = {STANDBY: (pair.standby.dsn(), PHYSICAL)}
        rows(pair.standby, "ALTER SYSTEM SET output_plugin_libraries = pgoutput")
        rows(pair.standby, "SELECT pg_reload_conf()")
        wait_for(lambda: plugins_finding(pair, candidates).severity is Severity.ERROR, 10, "doctor")
        assert "otherput" in plugins_finding(pair, candidates).what
        rows(pair.standby, "ALTER SYSTEM SET output_plugin_libraries = pgoutput, otherput")
        rows(pair.standby, "SELECT pg_reload_conf()")
        wait_for(lambda: plugins_finding(pair, candidates).severity is Severity.OK, 10, "doctor")
    for name in ("plain", "elsewhere"):
        there, here = inspect(pair.primary, name), inspect(pair.standby, name)
        assert (here["plugin"], here["database"]) == (there["plugin"], there["database"])
    # What is chosen: by database, or by plugin.
    for wanted in ({"databases": frozenset({"second"})}, {"plugins": frozenset({"otherput"})}):
        told = probe(synced_pair.plan(**wanted))[STANDBY]
        kept = {each.slot for each in told.transitions if each.after != "ORPHAN"}
        assert kept == {"elsewhere"}
    do(pair.primary, "second", "SELECT pg_drop_replication_slot('elsewhere')")
    do(pair.standby, "second", "SELECT tuskline_slots.drop('elsewhere')")
    pair.on_primary("DROP DATABASE second WITH (FORCE)")


def test_16_two_phase_is_kept(synced_pair: SlotStack, controller: Controller) -> None:
    pair = synced_pair.pair
    if pair.major < 14:
        pytest.skip("two_phase is of 14 and later")
    pair.on_primary("SELECT pg_create_logical_replication_slot('both', 'pgoutput', false, true)")
    until_ready(synced_pair, controller, {"both": "postgres"})
    there, here = inspect(pair.primary, "both"), inspect(pair.standby, "both")
    assert here["two_phase"]
    assert here["two_phase_at"] == there["two_phase_at"]


def test_16_two_phase_that_is_switched_on_later_begins_nowhere_in_the_copy_too(
    synced_pair: SlotStack, controller: Controller
) -> None:
    pair = synced_pair.pair
    if pair.major < 18:
        pytest.skip("ALTER_REPLICATION_SLOT changes two_phase from 18 on")
    pair.make_slot("later")
    options: dict[str, Any] = {"replication": "database"}
    with psycopg.connect(pair.primary.dsn(), autocommit=True, **options) as connection:
        connection.execute("ALTER_REPLICATION_SLOT later (TWO_PHASE true)")
    synced_pair.until(controller, "READY", "later")
    there, here = inspect(pair.primary, "later"), inspect(pair.standby, "later")
    assert (there["two_phase"], here["two_phase"]) == (True, True)
    assert (there["two_phase_at"], here["two_phase_at"]) == (None, None)


#: What a name or an operator without its schema would meet first.
_RAISES = "LANGUAGE plpgsql AS $$BEGIN RAISE EXCEPTION 'hostile'; END$$"
HOSTILE = (
    "CREATE SCHEMA hostile",
    "GRANT USAGE ON SCHEMA hostile TO PUBLIC",
    f"CREATE FUNCTION hostile.pg_is_in_recovery() RETURNS boolean {_RAISES}",
    f"CREATE FUNCTION hostile.to_jsonb(anyelement) RETURNS jsonb {_RAISES}",
    f"CREATE FUNCTION hostile.equal(text, text) RETURNS boolean {_RAISES}",
    "CREATE OPERATOR hostile.= (FUNCTION = hostile.equal, LEFTARG = text, RIGHTARG = text)",
    "CREATE VIEW hostile.pg_replication_slots AS SELECT 1 AS hostile",
)


def test_13_a_search_path_and_operators_of_somebody_else_change_nothing(
    synced_pair: SlotStack,
) -> None:
    pair = synced_pair.pair
    pair.on_primary(
        *HOSTILE,
        "CREATE ROLE wary LOGIN REPLICATION PASSWORD 'x'",
        "GRANT tuskline_slots, pg_read_all_stats TO wary",
        "ALTER ROLE wary SET search_path = hostile, pg_catalog",
        "ALTER DATABASE postgres SET search_path = hostile, pg_catalog",
    )
    pair.make_slot("kept")
    pair.catch_up()
    with (
        psycopg.connect(pair.primary.dsn(user="wary", password="x")) as session,
        pytest.raises(psycopg.errors.RaiseException, match="hostile"),
    ):
        session.execute("SELECT pg_is_in_recovery()")
    plan = synced_pair.plan()
    candidate = FailoverCandidate(STANDBY, pair.standby.dsn(user="wary", password="x"), PHYSICAL)
    wary = replace(
        plan, primary_dsn=pair.primary.dsn(user="wary", password="x"), candidates=(candidate,)
    )
    try:
        with Controller(wary) as controller:
            until_ready(synced_pair, controller, {"kept": "postgres"})
    finally:
        pair.on_primary(
            "ALTER DATABASE postgres RESET search_path",
            "DROP SCHEMA hostile CASCADE",
            "DROP ROLE wary",
        )
    assert slot_names(pair.standby) == {"kept"}


def test_1_on_an_idle_primary_a_copy_is_proven_too(synced_pair: SlotStack) -> None:
    """Nothing is written but what the controller asks for (16 and later)."""
    if synced_pair.pair.major < 16:
        pytest.skip("a snapshot cannot be asked for before 16")
    synced_pair.pair.make_slot("idle")
    with synced_pair.streaming("idle"), synced_pair.watching() as reports:
        wait_for(
            lambda: (
                reports
                and reports[-1].rounds
                and reports[-1][STANDBY].ready
                and slot_names(synced_pair.pair.standby) == {"idle"}
            ),
            40,
            "it is ready",
        )


@pytest.mark.long
def test_28_hundreds_of_slots_cost_little(synced_pair: SlotStack) -> None:
    pair, count = synced_pair.pair, 300
    for server in (pair.primary, pair.standby):
        rows(server, "ALTER SYSTEM SET max_replication_slots = 700")
    pair.primary.restart()
    pair.standby.restart()
    names = [f"many_{number}" for number in range(count)]
    for name in names:
        pair.make_slot(name)
    pair.catch_up()
    with synced_pair.controller() as controller:
        began = time.monotonic()
        until_ready(synced_pair, controller, dict.fromkeys(names, "postgres"), seconds=200)
        print(f"{count} slots ready after {time.monotonic() - began:.1f} s")
    with (
        PrimaryProbe(pair.primary.dsn()) as there,
        StandbyProbe(pair.standby.dsn(), pair.primary.dsn()) as here,
    ):
        for each in (there, here):
            each.read()
            began = time.monotonic()
            for _ in range(10):
                each.read()
            seconds = (time.monotonic() - began) / 10
            print(f"{type(each).__name__}: {seconds * 1000:.1f} ms for {count} slots")
            assert seconds < 1
