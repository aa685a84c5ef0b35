"""Which runs are merged when an epoch adds one.

Each run stays at least `RATIO` times as large as the next newer one, so a table has at most about log2(rows / rows of an
epoch) of them, and a row is written again only when its run grows by at least half: as often as the logarithm, at most.
"""

from collections.abc import Sequence

RATIO = 2


def merged(weights: Sequence[int], new: int) -> int:
    """How many of the newest runs go into one with the new run. `weights`: those of the runs, the oldest first."""
    total, count = max(new, 1), 0
    while count < len(weights) and weights[-1 - count] < RATIO * total:
        total += weights[-1 - count]
        count += 1
    return count
