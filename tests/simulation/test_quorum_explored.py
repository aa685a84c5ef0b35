"""Every order of events of small clusters: the real cores, all states by breadth first (24).

`explorer.py` states the abstraction. The scopes: two proposers of one server (`rivals`); a tail that only
one safekeeper has, which a promoted server must replace, with a power cut (`tail`); one in another version
(`version`); Raft's figure 8 in bytes (`figure 8`); a log that one safekeeper has (`ahead`); a resumption.
"""

import pytest

from tests.support.quorum.explorer import BASE, Explorer, Scope, ViolationError
from tests.support.quorum.mutants import mutant

pytestmark = pytest.mark.exhaustive

OLD = ((1, BASE, 1),)
NOTHING = ((), BASE)
SCOPES = {
    "rivals": Scope(((1, BASE, 9), (1, BASE, 9))),
    "tail": Scope(((2, 9, 11),), logs=((OLD, 9), (OLD, 9), (OLD, 10)), breaks=1),
    "version": Scope(
        ((2, 9, 11),), logs=(((*OLD, (2, 9, 2)), 10), ((*OLD, (2, 9, 2)), 10), (OLD, 10))
    ),
    "figure 8": Scope(
        ((1, BASE, 10), (2, BASE, 9)),
        logs=((((3, BASE, 2),), 9), (((2, BASE, 1),), 10), NOTHING),
        append_bytes=1,
    ),
    "ahead": Scope(((1, BASE, 9), (1, BASE, 9)), logs=((OLD, 9), NOTHING, NOTHING)),
    "resumption": Scope(((1, BASE, 9), (1, BASE, 9)), safekeepers=1, breaks=2),
}
FOUND_IN = {
    "1: VCL from before the vote": "rivals",
    "2: a vote for an equal term": "rivals",
    "3: no zeros over the tail": "tail",
    "3: the history first": "tail",
    "4: commits before the epoch": "figure 8",
    "4: votes are acknowledgements": "ahead",
    "5: a resumption truncates": "resumption",
    "6: by position alone": "version",
}


def explored(name: str) -> Explorer:
    explorer = Explorer(SCOPES[name])
    explorer.run()
    print(f"{name}: {explorer.states} distinct states, complete: {explorer.complete}")
    return explorer


@pytest.mark.parametrize("name", ["rivals", "tail", "version", "resumption"])
def test_24_no_order_of_events_breaks_the_rules(name: str) -> None:
    assert explored(name).complete


@pytest.mark.parametrize("name", FOUND_IN)
def test_24_the_explorer_finds_the_mutant(name: str) -> None:
    with mutant(name), pytest.raises(ViolationError) as found:
        explored(FOUND_IN[name])
    print(found.value)
