"""Copies of slots on real pairs of servers: a controller makes and proves them, and clients go on after a promotion."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.extension import MAJORS, remove_built
from tests.support.slot_copies import received
from tests.support.slot_sync import STANDBY, slot_stack


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    yield
    remove_built()


@pytest.mark.parametrize("major", MAJORS)
def test_6_a_client_goes_on_after_a_promotion(major: int, tmp_path: Path) -> None:
    with slot_stack(major, tmp_path) as stack:
        stack.pair.make_slot("kept")
        with stack.controller() as controller:
            stack.until(controller, "READY", "kept")
            # Its client has these, and the copy has not heard of it.
            stack.load.write(20)
            stack.consume("kept")
            stack.load.write(20)
            stack.pair.catch_up()
            assert controller.once(10)[STANDBY].ready
        before = len(stack.read["kept"])
        stack.pair.promote()
        after = received(stack.pair.standby, "kept")
        assert set(stack.read["kept"]) | set(after) == set(stack.load.written)
        assert after == sorted(set(after))
        assert before == len(set(stack.read["kept"]))
