"""PostgreSQL's own synchronization of slots (17 and later), watched and judged by the same rules."""

from pathlib import Path

import psycopg
import pytest

from slot_sync.controller import Controller
from slot_sync.resolver.transitions import CopyState, Nothing, RestoreMappings, Wait
from tests.support.attached import Attached
from tests.support.extension import MAJORS
from tests.support.slot_copies import Pair, decoded, inspect, rows, slot_names
from tests.support.slot_sync import STANDBY, attached, slot_stack
from tests.support.waiting import wait_for

NATIVE = [each for each in MAJORS if isinstance(each.values[0], int) and each.values[0] >= 17]


@pytest.mark.parametrize("major", NATIVE)
def test_30_native_copies_are_judged_and_left_to_the_server(major: int, tmp_path: Path) -> None:
    with slot_stack(major, tmp_path) as synced_pair:
        pair = synced_pair.pair
        for statement in (
            "ALTER SYSTEM SET sync_replication_slots = on",
            "SELECT pg_reload_conf()",
        ):
            rows(pair.standby, statement)
        pair.on_primary(
            "SELECT pg_create_logical_replication_slot('native', 'pgoutput', false, false, true)"
        )
        pair.make_slot("ours")
        seen: list[CopyState] = []
        with synced_pair.controller() as controller:

            def ready() -> bool:
                synced_pair.turn_over("native", "ours")
                pair.catch_up()
                report = controller.once(10)[STANDBY]
                found = {each.slot: each for each in report.transitions}
                seen.append(found["native"].after)
                # The slot itself is left alone, and there is no second copy of it.
                assert isinstance(found["native"].action, Wait | Nothing | RestoreMappings)
                return all(each.safe for each in found.values())

            wait_for(ready, 60, "both are ready")
            copy = inspect(pair.standby, "native")
            assert (copy["synced"], copy["persistency"]) == (True, "persistent")
            assert copy["mappings_complete"]
            assert not inspect(pair.standby, "ours")["synced"]
            assert slot_names(pair.standby) == {"native", "ours"}
            assert seen[0] is not CopyState.READY
            synced_pair.load.write(5)
            pair.catch_up()
            assert controller.once(10)[STANDBY].ready
        expected = {name: decoded(pair.primary, name) for name in ("native", "ours")}
        pair.promote()
        for name, numbers in expected.items():
            assert len(numbers) == 5
            assert set(numbers) <= set(decoded(pair.standby, name))


@pytest.mark.parametrize("major", NATIVE)
def test_45_native_copies_without_the_extension_have_a_weaker_verdict(
    major: int, tmp_path: Path
) -> None:
    """As on a managed service: PostgreSQL's own word, under its own name, and what it does not show."""
    with slot_stack(major, tmp_path / "pair") as stack:
        pair = stack.pair
        pair.on_primary(
            "DROP SCHEMA tuskline_slots CASCADE" if major < 18 else "DROP EXTENSION tuskline",
            "SELECT pg_create_logical_replication_slot('native', 'pgoutput', false, false, true)",
            "SELECT pg_create_logical_replication_slot('plain', 'pgoutput')",
        )
        rows(pair.standby, "ALTER SYSTEM SET sync_replication_slots = on")
        rows(pair.standby, "SELECT pg_reload_conf()")
        with attached(stack, tmp_path, max_age=600, names=["native"]) as tuskline:
            stack.folder = tmp_path / "log"

            def state(config: Attached, code: int) -> str:
                (found,) = config.json("slots", "ready", "--standby", STANDBY, code=code)["slots"]
                assert bool(found["not_known"]) is (found["state"] == "SYNCED")
                return str(found["state"])

            with stack.controller(names=frozenset({"native"})) as controller:

                def synced() -> bool:
                    stack.turn_over("native")
                    pair.catch_up()
                    (found,) = controller.once(10)[STANDBY].transitions
                    return found.after is CopyState.SYNCED

                wait_for(synced, 60, "PostgreSQL has synchronized it")
            # Neither a yes nor a no, unless the operator says that it is enough.
            assert state(tuskline, 2) == "SYNCED"
            config = tuskline.config.read_text()
            tuskline.config.write_text(
                config.replace("max_age = 600", "max_age = 600\naccept_native = true")
            )
            assert state(tuskline, 0) == "SYNCED"
            # What PostgreSQL does not keep only the extension could.
            tuskline.config.write_text(config.replace('"native"', '"plain"'))
            (plain,) = tuskline.json("slots", "status", code=1)["slots"]
            assert plain["reason"] == "no_extension"
            tuskline.config.write_text(
                config.replace("max_age = 600", "max_age = 600\naccept_native = true")
            )
            pair.primary.stop("immediate")
            assert state(tuskline, 0) == "SYNCED"
            assert state(tuskline, 0) == "SYNCED"
            told = tuskline.json("slots", "ready", "--standby", STANDBY, "--max-age", "0", code=2)
            assert told["slots"][0]["reason"] == "proven_long_ago"


def set_failover(pair: Pair, name: str, value: bool) -> None:
    """As a subscription of 17 and later does it."""
    with psycopg.connect(pair.primary.dsn(replication="database"), autocommit=True) as connection:
        connection.execute(f"ALTER_REPLICATION_SLOT {name} (FAILOVER {str(value).lower()})")


def native_sync(pair: Pair, value: str) -> None:
    rows(pair.standby, f"ALTER SYSTEM SET sync_replication_slots = {value}")
    rows(pair.standby, "SELECT pg_reload_conf()")


@pytest.mark.parametrize("major", NATIVE)
def test_41_a_copy_gives_way_when_its_slot_becomes_postgresqls(major: int, tmp_path: Path) -> None:
    with slot_stack(major, tmp_path) as stack, stack.controller() as controller:
        pair = stack.pair
        pair.make_slot("ours")
        stack.until(controller, "READY", "ours")
        pair.on_primary(
            "SELECT pg_create_logical_replication_slot('native', 'pgoutput', false, false, true)"
        )
        native_sync(pair, "on")
        stack.until(controller, "READY", "ours", "native")
        set_failover(pair, "ours", value=True)

        def is_native() -> bool:
            stack.turn_over("native", "ours")
            pair.catch_up()
            report = controller.once(10)[STANDBY]
            synced = "SELECT synced FROM pg_replication_slots WHERE slot_name = 'ours'"
            found = rows(pair.standby, synced)
            # While nobody has proven one that PostgreSQL made, none is ready.
            assert found == [(True,)] or not report.ready
            return bool(report.ready)

        wait_for(is_native, 60, "PostgreSQL's own copies of both are ready")
        stack.load.write(5)
        pair.catch_up()
        expected = {name: decoded(pair.primary, name) for name in ("native", "ours")}
        pair.promote()
        for name, numbers in expected.items():
            assert set(numbers) <= set(decoded(pair.standby, name))


@pytest.mark.parametrize("major", NATIVE)
def test_41_failover_of_a_copy_is_the_slots_and_survives_a_promotion(
    major: int, tmp_path: Path
) -> None:
    query = "SELECT failover FROM pg_replication_slots WHERE slot_name = 'kept'"
    with slot_stack(major, tmp_path) as stack, stack.controller() as controller:
        pair = stack.pair
        pair.on_primary(
            "SELECT pg_create_logical_replication_slot('kept', 'pgoutput', false, false, true)"
        )
        for value in (True, False, True):
            set_failover(pair, "kept", value)
            stack.until(controller, "READY", "kept")
            assert rows(pair.standby, query) == [(value,)]
        # It is on disk, too.
        pair.standby.stop("immediate")
        pair.standby.start()
        assert rows(pair.standby, query) == [(True,)]
        stack.load.write(5)
        pair.catch_up()
        expected = decoded(pair.primary, "kept")
        pair.promote()
        assert rows(pair.standby, query) == [(True,)]
        assert set(expected) <= set(decoded(pair.standby, "kept"))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("major", NATIVE)
def test_41_failover_toggled_under_load_ends_ready_and_nothing_is_lost(
    major: int, tmp_path: Path
) -> None:
    with slot_stack(major, tmp_path) as stack, stack.controller() as controller:
        pair = stack.pair
        for name in ("kept", "other"):
            pair.make_slot(name)
        native_sync(pair, "on")
        for number in range(8):
            set_failover(pair, "kept", value=number % 2 == 0)
            for _ in range(number):
                stack.turn_over("kept", "other")
                controller.once(10)
        stack.until(controller, "READY", "kept", "other")
        stack.load.write(5)
        pair.catch_up()
        expected = {name: decoded(pair.primary, name) for name in ("kept", "other")}
        assert controller.once(10)[STANDBY].ready
        pair.promote()
        for name, numbers in expected.items():
            assert len(numbers) >= 5
            assert set(numbers) <= set(decoded(pair.standby, name))


@pytest.mark.parametrize("major", NATIVE)
def test_47_a_native_copy_that_nothing_keeps_up_is_neither_ready_nor_synced(
    major: int, tmp_path: Path
) -> None:
    """sync_replication_slots is switched off after PostgreSQL has made its copy: it stays, and says that it is synced."""
    with slot_stack(major, tmp_path) as stack:
        pair = stack.pair
        pair.on_primary(
            "SELECT pg_create_logical_replication_slot('native', 'pgoutput', false, false, true)"
        )

        def found(controller: Controller) -> tuple[str, str]:
            pair.catch_up()
            (one,) = controller.once(10)[STANDBY].transitions
            return str(one.after), str(one.reason)

        def until(controller: Controller, state: str) -> None:
            def reached() -> bool:
                stack.turn_over("native")
                return found(controller)[0] == state

            wait_for(reached, 60, f"it is {state}")

        native_sync(pair, "on")
        with stack.controller() as controller:
            until(controller, "READY")
            native_sync(pair, "off")
            wait_for(lambda: found(controller)[1] == "not_synchronized", 30, "it is said")
            stack.turn_over("native")
            assert found(controller) == ("SUSPECT", "not_synchronized")
            native_sync(pair, "on")
            until(controller, "READY")
        pair.on_primary(
            "DROP SCHEMA tuskline_slots CASCADE" if major < 18 else "DROP EXTENSION tuskline"
        )
        with stack.controller(names=frozenset({"native"})) as controller:
            until(controller, "SYNCED")
            native_sync(pair, "off")
            wait_for(lambda: found(controller)[1] == "not_synchronized", 30, "it is said")
            stack.turn_over("native")
            assert found(controller) == ("SUSPECT", "not_synchronized")
            pair.primary.stop("immediate")
            (one,) = controller.once(10)[STANDBY].transitions
            assert one.after is CopyState.SUSPECT
            assert "sync_replication_slots" in one.why
