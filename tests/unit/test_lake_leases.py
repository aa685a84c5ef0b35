"""The date until which a lake's driver may be down is named while there are days left to act."""

import pytest

from spark_consumers.lake.writer import leases as of_writers
from walsender_bridge.change_log.repository.core import LONGEST_LEASE
from walsender_bridge.change_log.repository_messages import ConsumerDescription
from walsender_bridge.cli import log_rebuild
from walsender_bridge.cli.log_trim import duration
from walsender_bridge.doctor import log
from walsender_bridge.doctor.finding import Severity
from walsender_bridge.observability import lake_leases

DAY = 86_400.0
LAKE = "lake-0f5c7a52-6f0e-4f0e-9a52-6f0e4f0e9a52"
#: 2026-01-01.
NOW = 1_767_225_600.0


def consumer(name: str, seconds: float) -> ConsumerDescription:
    return ConsumerDescription(name, 3, seconds, {})


def test_the_lease_of_a_lake_outlasts_a_stop_of_a_week_by_days() -> None:
    assert of_writers.LEASE - of_writers.RENEWAL > 9 * DAY
    # No more than the log grants, and a rebuilt one waits for as long.
    assert of_writers.LEASE <= LONGEST_LEASE
    assert duration(log_rebuild._HOLD) == LONGEST_LEASE


@pytest.mark.parametrize(
    ("name", "seconds", "is_told"),
    [
        (LAKE, of_writers.LEASE, False),
        (LAKE, of_writers.LEASE - of_writers.RENEWAL, False),
        # One of an earlier version, whose lease was a week.
        (LAKE, 7 * DAY - of_writers.RENEWAL, False),
        (LAKE, 3 * DAY, True),
        # Its copies and paused tables, and other consumers, have leases of their own lengths.
        (f"{LAKE}-copy-shop", DAY, False),
        (f"{LAKE}-paused-shop.public.orders", DAY, False),
        ("lake-of-mine", DAY, False),
    ],
)
def test_a_lake_whose_lease_ends_soon_is_named_with_the_date(
    name: str, seconds: float, *, is_told: bool
) -> None:
    told = list(lake_leases.ending([consumer(name, seconds)], NOW))
    assert bool(told) is is_told
    for lease in told:
        assert LAKE in lease.what
        assert lease.what.endswith("until 2026-01-04T00:00:00.000Z")
        assert lease.sentence == f"log: {lease.what}; {lease.repair}"
    found = list(log.leases([consumer(name, seconds)]))
    assert bool(found) is is_told
    for finding in found:
        assert finding.severity is Severity.WARNING
        assert finding.repair.startswith("start tuskline lake run")
