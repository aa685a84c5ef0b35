"""The oldest of several hot standby feedbacks: what the primary's VACUUM must keep for all of them.

A WAL server takes it over its readers and slots, and the proposer over the safekeepers; the primary's walsender is sent
the result. Ids below 3 are no transactions (PostgreSQL's `TransactionIdIsNormal`): the walsender takes a feedback whose
two ids are below 3 for "off" and forgets what it kept, so such an id must not hide another reader's.

A transaction id has 32 bits and wraps around. Its epoch makes it a number of 64 bits that only grows, as PostgreSQL's
`FullTransactionId`; among ids that a server has in use this is the order of `TransactionIdPrecedes`.
"""

from collections.abc import Iterable
from typing import Final

from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback

#: PostgreSQL's `FirstNormalTransactionId`: 0 is none, 1 and 2 are what bootstrap wrote and what is frozen.
FIRST_NORMAL: Final = 3


def oldest(feedbacks: Iterable[HotStandbyFeedback]) -> HotStandbyFeedback:
    """The least of each of the two ids, over those that name a transaction; 0, with epoch 0, if none does."""
    each_one = list(feedbacks)
    rows = _least((each.xmin_epoch, each.xmin) for each in each_one)
    catalog = _least((each.catalog_xmin_epoch, each.catalog_xmin) for each in each_one)
    return HotStandbyFeedback(rows[1], rows[0], catalog[1], catalog[0])


def _least(ids: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Of pairs of epoch and id."""
    return min((each for each in ids if each[1] >= FIRST_NORMAL), default=(0, 0))
