"""Hot-standby feedback of many readers, as one: what the primary's VACUUM must still keep for all of them.

A transaction id has 32 bits and wraps around; with its epoch it is one number of 64 bits that only grows, and by
that number the oldest is found. Source: PostgreSQL documentation, "Hot Standby Feedback message".
"""

from collections.abc import Iterable

from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback

#: Ids below are not transactions of anybody (0 is "none").
_FIRST_NORMAL = 3


def oldest(feedbacks: Iterable[HotStandbyFeedback]) -> HotStandbyFeedback:
    """The minimum of each of the two horizons, over those that have one."""
    everything = list(feedbacks)
    rows = _minimum((each.xmin_epoch, each.xmin) for each in everything)
    catalog = _minimum((each.catalog_xmin_epoch, each.catalog_xmin) for each in everything)
    return HotStandbyFeedback(rows[1], rows[0], catalog[1], catalog[0])


def _minimum(horizons: Iterable[tuple[int, int]]) -> tuple[int, int]:
    return min((each for each in horizons if each[1] >= _FIRST_NORMAL), default=(0, 0))
