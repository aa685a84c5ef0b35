"""The oldest of several hot standby feedbacks, which the primary's VACUUM must heed.

A WAL server computes it over its readers and slots, and the proposer over the safekeepers; the result is sent to the
primary's walsender. Ids below 3 are not normal transactions (PostgreSQL's `TransactionIdIsNormal`): the walsender takes a
feedback whose two ids are below 3 for "off" and drops its xmin, so such an id must not hide another reader's.

A transaction id has 32 bits and wraps around. Its epoch extends it to a 64-bit number that only grows, as PostgreSQL's
`FullTransactionId`; among ids that a server has in use this is the order of `TransactionIdPrecedes`.
"""

from collections.abc import Iterable
from typing import Final

from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback

#: PostgreSQL's `FirstNormalTransactionId`: 0 is invalid, 1 is bootstrap, 2 is frozen.
FIRST_NORMAL: Final = 3


def oldest(feedbacks: Iterable[HotStandbyFeedback]) -> HotStandbyFeedback:
    """The oldest of each of the two ids, among normal ones; 0, with epoch 0, if there is none."""
    each_one = list(feedbacks)
    rows = _least((each.xmin_epoch, each.xmin) for each in each_one)
    catalog = _least((each.catalog_xmin_epoch, each.catalog_xmin) for each in each_one)
    return HotStandbyFeedback(rows[1], rows[0], catalog[1], catalog[0])


def _least(ids: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The least of pairs of epoch and id."""
    return min((each for each in ids if each[1] >= FIRST_NORMAL), default=(0, 0))
