"""How far terms may be apart. Pure.

A term grows by one with each election, and none is ever used again. One message with the greatest term there is would leave no
term for anybody to be elected in. So no term is greater than `MAX_TERM`, and a safekeeper gives no vote to one that is more
than `MAX_LEAP` above what it knows of earlier elections.

A proposer campaigns above the votes that it hears of only if they are not more than `MAX_REACH` above those of the others: a safekeeper
that has voted further on, whoever asked it, is left out by itself. `MAX_REACH` is far less than `MAX_LEAP`: the proposer may
die when the first of the others has voted, and the next one still has to reach those that have not.
"""

from typing import Final

#: The greatest term; half of what 64 bits hold.
MAX_TERM: Final = (1 << 63) - 1
#: The most by which a safekeeper's vote may exceed the one before it.
MAX_LEAP: Final = 1 << 32
#: The most by which a proposer goes further than a safekeeper: more elections than fail in years.
MAX_REACH: Final = 1 << 20


def follows(term: int, own: int, elected: int, most: int = MAX_LEAP) -> bool:
    """Whether a safekeeper may go from term `own` to this one, as far as their distance is concerned.

    `elected`: the last term that the membership knows to have been elected. It speaks for a safekeeper that is new, or was
    away while the others went on.
    """
    return term <= MAX_TERM and term - max(own, elected) <= most
