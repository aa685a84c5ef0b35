"""The clock of leases and retentions: as the wall clock goes, never as it jumps."""

import pytest

from walsender_bridge.runtime.steady_clock import SteadyClock

DAY = 86_400.0


class Clocks:
    """A wall clock and a monotonic one, and what was said about jumps."""

    def __init__(self, since: float = 0.0) -> None:
        self.wall, self.monotonic = 1_000 * DAY, 5.0
        self.jumps: list[float] = []
        self.steady = SteadyClock(
            since,
            wall=lambda: self.wall,
            monotonic=lambda: self.monotonic,
            jumped=self.jumps.append,
        )

    def pass_(self, seconds: float) -> float:
        self.wall += seconds
        self.monotonic += seconds
        return self.steady.now()


def test_it_goes_with_the_wall_clock() -> None:
    clocks = Clocks()
    assert clocks.steady.now() == clocks.wall
    assert clocks.pass_(DAY) == clocks.wall
    assert clocks.jumps == []


@pytest.mark.parametrize("leap", [8 * DAY, 3_000 * DAY])
def test_a_leap_ahead_ends_nothing_and_is_said(leap: float) -> None:
    clocks = Clocks()
    before = clocks.wall
    clocks.wall += leap
    assert clocks.pass_(1.0) <= before + 2.0
    assert clocks.jumps == [pytest.approx(leap)]
    # A lease of a week is not over after three days, and what is older than its retention goes in the end.
    assert clocks.pass_(3 * DAY) < before + 7 * DAY
    clocks.pass_(2 * leap)
    assert clocks.steady.now() == clocks.wall
    assert clocks.jumps == [pytest.approx(leap)]


def test_a_leap_back_stops_no_lease() -> None:
    clocks = Clocks()
    before = clocks.wall
    clocks.wall -= 30 * DAY
    assert clocks.steady.now() == before
    assert clocks.jumps == [-30 * DAY]
    # Leases go on to run.
    assert clocks.pass_(DAY) == before + DAY


def test_time_while_nothing_ran_is_caught_up_with_in_steps() -> None:
    clocks = Clocks(since=992 * DAY)
    assert clocks.steady.now() == 992 * DAY
    assert clocks.pass_(DAY) == 994 * DAY
    assert clocks.pass_(30 * DAY) == clocks.wall
    assert clocks.jumps == []
