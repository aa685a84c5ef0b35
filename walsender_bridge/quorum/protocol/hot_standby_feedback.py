"""The oldest of several hot-standby feedbacks: what the primary must keep for all of them.

Transaction numbers are compared with their epoch, as 64-bit ones; 0 means that nothing is held.
"""

from collections.abc import Iterable

from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback


def oldest(feedbacks: Iterable[HotStandbyFeedback]) -> HotStandbyFeedback:
    """Each field's least that holds something."""
    told = list(feedbacks)
    xmin = _least((each.xmin_epoch, each.xmin) for each in told)
    catalog = _least((each.catalog_xmin_epoch, each.catalog_xmin) for each in told)
    return HotStandbyFeedback(xmin[1], xmin[0], catalog[1], catalog[0])


def _least(marks: Iterable[tuple[int, int]]) -> tuple[int, int]:
    return min((mark for mark in marks if mark[1]), default=(0, 0))
