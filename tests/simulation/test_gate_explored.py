"""42: the commit gate against models of servers that take turns, and of lists that are edited: all sequences of events."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from tests.support import gate_lists
from tests.support.gate_model import PassedError, explore
from walsender_bridge.capture.gate import core as gate
from walsender_bridge.capture.gate import slots as gate_slots
from walsender_bridge.capture.gate.core import GateDecision
from walsender_bridge.capture.gate.record import GateRecord
from walsender_bridge.capture.gate.slots import GateSlot, Sender
from walsender_bridge.errors import InvariantError

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


def test_42_no_edits_of_the_list_excuse_two_servers_or_close_the_gate() -> None:
    assert gate_lists.explore() > 2000


def _keeps_who_was_promoted(
    self: GateRecord, decision: GateDecision, candidate: str, timeline: int
) -> None:
    before = dict(self.standings) if timeline == self.timeline else {}
    take(self, decision, candidate, timeline)
    self.standings = (
        {**before, candidate: self.standings[candidate]} if candidate else self.standings
    )


take = GateRecord._take


def test_42_a_record_that_keeps_two_promoted_servers_is_found() -> None:
    with (
        mock.patch.object(GateRecord, "_take", _keeps_who_was_promoted),
        pytest.raises(InvariantError, match="one_candidate_is_the_server"),
    ):
        gate_lists.explore()
