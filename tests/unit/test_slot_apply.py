"""How actions on copies are carried out: what a step of an advance decodes, and how long it may take."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slot_sync.apply import SLOWEST, STEP_BYTES, carry_out
from slot_sync.resolver.transitions import Advance, RestoreMappings
from slot_sync.sessions import ACTION_SECONDS
from walsender_bridge.postgres.protocol.lsn import format_lsn, parse_lsn

END = 100 << 30


class Standby:
    """A copy that an open transaction holds at position 1; each call takes a second for so much WAL."""

    pace = 2 * SLOWEST

    def __init__(self) -> None:
        self.confirmed = 1
        self.steps: list[int] = []
        self.allowed = ACTION_SECONDS

    @contextmanager
    def lent(self, database: str | None) -> Iterator["Standby"]:
        assert database == "shop"
        yield self

    @contextmanager
    def allowing(self, seconds: float) -> Iterator[None]:
        self.allowed = seconds
        yield
        self.allowed = ACTION_SECONDS

    def one(self, text: str, values: dict[str, str] | None = None) -> Any:
        if text == "slot_sync/trusted":
            return True
        assert values is not None
        if text == "slot_sync/positions":
            return [format_lsn(each) for each in (1, self.confirmed, END)]
        to = parse_lsn(values.get("lsn", format_lsn(END)))
        assert (to - 1) / self.pace < self.allowed, "the server cancels it"
        if text == "slot_sync/advance":
            self.steps.append(to - self.confirmed)
            self.confirmed = to
        return format_lsn(to)


def test_a_copy_that_a_long_transaction_holds_reaches_its_slot() -> None:
    standby: Any = Standby()
    carry_out(Advance("kept", "shop", END), standby, standby)
    assert standby.confirmed == END
    # What is decoded again for each step is no more than what the step adds.
    assert min(standby.steps[:-1]) >= STEP_BYTES - 1
    assert len(standby.steps) < 12


def test_restoring_mapping_files_may_take_as_long_as_its_wal() -> None:
    standby: Any = Standby()
    carry_out(RestoreMappings("kept", "shop"), standby, standby)
    assert standby.steps == []
