"""42: the commit gate against a model of two servers that take turns: all sequences of events."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from tests.support.gate_model import PassedError, explore
from walsender_bridge.capture.gate import core as gate
from walsender_bridge.capture.gate import slots as gate_slots
from walsender_bridge.capture.gate.slots import GateSlot, Sender

LENGTH = 24


def test_42_no_sequence_of_events_passes_what_the_standby_lacks() -> None:
    found = [*explore(LENGTH)]
    print(f"{sum(found)} worlds")
    assert sum(found) > 5000


def _whatever_was_sent(name: str, slot: GateSlot, sender: Sender) -> str:
    return real(name, slot, replace(sender, sent_lsn=1 << 62))


def _by_the_slot_alone(name: str, slot: GateSlot, sender: Sender) -> str:
    return real(name, slot, replace(sender, flush_lsn=sender.flush_lsn or 0))


def _position_of_the_slot(slot: GateSlot) -> int | None:
    return slot.restart_lsn


real = gate_slots._unreliable
MUTANTS: dict[str, list[tuple[Any, str, Any]]] = {
    "any flush position": [(gate_slots, "_unreliable", _whatever_was_sent)],
    "the slot's memory": [
        (gate_slots, "_unreliable", _by_the_slot_alone),
        (gate, "flushed_by", _position_of_the_slot),
    ],
}


@pytest.mark.parametrize("name", MUTANTS)
def test_42_what_is_taken_out_of_the_gate_is_found(name: str) -> None:
    with ExitStack() as stack:
        for module, function, mutant in MUTANTS[name]:
            stack.enter_context(mock.patch.object(module, function, mutant))
        found = stack.enter_context(pytest.raises(PassedError))
        [*explore(LENGTH)]
    print(found.value)
