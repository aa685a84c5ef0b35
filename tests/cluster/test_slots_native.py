"""PostgreSQL's own synchronization of slots (17 and later), watched and judged by the same rules."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from slot_sync.resolver.transitions import State
from tests.support.extension import MAJORS, remove_built
from tests.support.slot_copies import decoded, inspect, rows, slot_names
from tests.support.slot_sync import STANDBY, slot_stack
from tests.support.waiting import wait_for

NATIVE = [each for each in MAJORS if isinstance(each.values[0], int) and each.values[0] >= 17]


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    yield
    remove_built()


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
        seen: list[State] = []
        with synced_pair.controller() as controller:

            def ready() -> bool:
                synced_pair.turn_over("native", "ours")
                pair.catch_up()
                report = controller.once(10)[STANDBY]
                found = {each.slot: each for each in report.transitions}
                seen.append(found["native"].after)
                # Nothing is ever done to it, and there is no second copy of it.
                assert type(found["native"].action).__name__ in {"Wait", "Nothing"}
                return all(each.safe for each in found.values())

            wait_for(ready, 60, "both are ready")
            copy = inspect(pair.standby, "native")
            assert (copy["synced"], copy["persistency"]) == (True, "persistent")
            assert not inspect(pair.standby, "ours")["synced"]
            assert slot_names(pair.standby) == {"native", "ours"}
            assert seen[0] is not State.READY
            synced_pair.load.write(5)
            pair.catch_up()
            assert controller.once(10)[STANDBY].ready
        expected = {name: decoded(pair.primary, name) for name in ("native", "ours")}
        pair.promote()
        for name, numbers in expected.items():
            assert len(numbers) == 5
            assert set(numbers) <= set(decoded(pair.standby, name))
