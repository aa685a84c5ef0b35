"""How far terms may be apart. Pure.

A term grows by one with each election, and none is ever used again. One message with the greatest possible term would
leave no term for another election. So no term exceeds `MAX_TERM`, and a safekeeper does not vote for a term that is more
than `MAX_LEAP` above what it knows of earlier elections.

A proposer campaigns above the votes that it learns of only if they are at most `MAX_REACH` above those of the others: a
safekeeper that has voted beyond that, at any proposer's request, is left out. `MAX_REACH` is far less than `MAX_LEAP`: the
proposer may die after the first of the others has voted, and the next one still has to reach those that have not.
"""

from typing import Final

#: The greatest term; half the range of 64 bits.
MAX_TERM: Final = (1 << 63) - 1
#: The most by which a safekeeper's vote may exceed the one before it.
MAX_LEAP: Final = 1 << 32
#: The most by which a proposer's term may exceed a safekeeper's vote: more elections than fail in years.
MAX_REACH: Final = 1 << 20


def follows(term: int, own: int, elected: int, most: int = MAX_LEAP) -> bool:
    """Whether a safekeeper may advance from term `own` to this one, as far as their distance is concerned.

    `elected`: the last elected term in its membership. It covers a safekeeper that is new, or was disconnected during
    elections.
    """
    return term <= MAX_TERM and term - max(own, elected) <= most
