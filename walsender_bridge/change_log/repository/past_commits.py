"""The past commits of a stream that the repository keeps for consumers that lag: fewer, the older they are. Pure.

A lease holds back trimming at the end of the commit in effect at its consumer's version. A consumer may be a week behind, which is
millions of commits, and it may renew its lease at any of their versions. So of the commits behind those that the replicas still
need, only some are kept: the distance between two of them is at most an eighth (`_PART`) of their distance to the present. Of a
version between two, the older one counts. That is never behind what the consumer needs, so nothing is trimmed too early (I10); what it
holds back beyond its need is at most an eighth of its lag.

The number of commits kept grows with the logarithm of the lag: some two hundred for a billion versions. They are thinned out only
when there are `MOST`, so that each commit costs little, and the result depends on the commits alone (I11).
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

#: Commits that are kept of a stream, at most.
MOST: Final = 256
_PART: Final = 8


@dataclass(frozen=True, slots=True)
class PastCommit:
    """`end`: the local offset behind the commit of that version. `bytes_total`: see `Position`."""

    version: int
    end: int
    bytes_total: int


def at(past: Sequence[PastCommit], version: int) -> PastCommit | None:
    """The newest commit kept that is not behind the version; None if there is none."""
    place = bisect_right(past, version, key=lambda each: each.version)
    return past[place - 1] if place else None


def needed_from(past: Sequence[PastCommit], version: int) -> list[PastCommit]:
    """The commits that leases at this version or a later one need."""
    place = bisect_right(past, version, key=lambda each: each.version)
    return list(past[max(place - 1, 0) :])


def thinned(past: Sequence[PastCommit], present: int) -> list[PastCommit]:
    """See the module. `present`: the version behind them."""
    kept = list(past[:1])
    for each, following in pairwise(past[1:]):
        if (following.version - kept[-1].version) * _PART > present - following.version:
            kept.append(each)
    return kept + list(past[1:][-1:])
