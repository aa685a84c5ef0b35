"""Leases of lakes at the change log that have not been renewed for days: the date until which a lake's driver may be down. Pure.

A driver renews its lease every hour. When the lease ends, the log trims what the lake lacks, and all its tables have to be copied
again: so the date is named while a start of the driver, or a longer `[log] retention`, still prevents that.
"""

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from walsender_bridge.runtime.times import iso_time

if TYPE_CHECKING:
    # Importing the log's client takes longer than the query (`log_problems`).
    from walsender_bridge.change_log.repository_messages import ConsumerDescription

#: Seconds before its end from which on a lease is told of. A driver that runs keeps every lease longer than that.
TOLD: Final = 5 * 86_400.0
#: The consumer of a lake, and not one of its copies or paused tables, whose leases are their own.
_OF_A_LAKE: Final = re.compile(r"lake-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


class EndingLease(NamedTuple):
    """What is wrong with a lease, and its repair."""

    what: str
    repair: str

    @property
    def sentence(self) -> str:
        """Both, as `status` has them."""
        return f"log: {self.what}; {self.repair}"


def ending(consumers: "Iterable[ConsumerDescription]", now: float) -> Iterator[EndingLease]:
    """The leases of lakes that end within `TOLD` seconds. `now`: Unix seconds."""
    for consumer in consumers:
        if _OF_A_LAKE.fullmatch(consumer.name) and consumer.lease_seconds < TOLD:
            end = iso_time(round(now + consumer.lease_seconds))
            yield EndingLease(
                f"the driver of {consumer.name} has not renewed its lease for days, and the log keeps what the lake lacks until {end}",
                "start tuskline lake run before, or set [log] retention to more seconds than it will have been down",
            )
