"""Which runs are merged when an epoch adds one.

Each run stays at least `RATIO` times as large as the next newer one, so a table has at most about log2(rows / rows of an
epoch) of them, and a row is written again only when its run grows by at least half: as often as the logarithm, at most.
"""

from collections.abc import Sequence

RATIO = 2


def unmerged(weights: Sequence[int], least: int) -> tuple[int, int] | None:
    """Of runs, the oldest first, some neighbours to merge so that each is `RATIO` times as large as the next newer one again.

    From where to where (exclusive); None if they are so, but for runs of less than `least`, which epochs merge soon.
    """
    for begin in range(len(weights) - 1):
        if weights[begin + 1] >= least and weights[begin] < RATIO * weights[begin + 1]:
            end, total = begin + 2, weights[begin] + weights[begin + 1]
            while end < len(weights) and total < RATIO * weights[end]:
                total += weights[end]
                end += 1
            return begin, end
    return None


def merged(weights: Sequence[int], new: int) -> int:
    """How many of the newest runs go into one with the new run. `weights`: those of the runs, the oldest first."""
    total, count = max(new, 1), 0
    while count < len(weights) and weights[-1 - count] < RATIO * total:
        total += weights[-1 - count]
        count += 1
    return count
