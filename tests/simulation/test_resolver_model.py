"""The slot resolver against a model of two servers: all sequences of events, by breadth first (18, 19).

`tests/support/slots/world.py` is the servers, `decoder.py` what a decoder would send, `scopes.py` where it begins.
A copy that is called safe has to be complete at that moment, and, once it stands by itself, for as long as nothing
happens that shows at the next poll. So has one that is called safe at any moment because the primary is silent (27).
"""

import pytest

from slot_sync.resolver import conditions
from tests.support.slots.mutants import CONDITIONS, OTHERS, mutant
from tests.support.slots.scopes import SCOPES
from tests.support.slots.search import LossError, Search

#: Events in a sequence, those that stand for two or three counted as one. "others" has the most events by far.
LENGTH, WHOLE_LENGTH = 6, 8
LENGTHS = {"others": 5}

SEARCHES = [(scope, start) for scope, (starts, _) in SCOPES.items() for start in starts]
NAMES = [f"{scope}, {start.__name__}" for scope, start in SEARCHES]


def explored(scope: str, start, length: int) -> Search:
    search = Search([start()], SCOPES[scope][1])
    search.run(length)
    print(f"{scope}, {start.__name__}: {len(search.seen)} worlds, {length} events")
    return search


@pytest.mark.parametrize(("scope", "start"), SEARCHES, ids=NAMES)
def test_19_no_sequence_makes_a_broken_copy_ready(scope: str, start) -> None:
    assert len(explored(scope, start, LENGTHS.get(scope, LENGTH)).seen) > 100


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("scope", "start"), SEARCHES, ids=NAMES)
def test_19_no_sequence_of_eight_events_makes_a_broken_copy_ready(scope: str, start) -> None:
    assert len(explored(scope, start, WHOLE_LENGTH).seen) > 100


def test_18_each_condition_has_a_mutant() -> None:
    assert {each.holds.__name__ for each in conditions.CONDITIONS} == CONDITIONS.keys()


@pytest.mark.parametrize("name", [*CONDITIONS, *OTHERS])
def test_18_what_is_taken_out_of_the_resolver_is_found(name: str) -> None:
    start, events, length = {**CONDITIONS, **OTHERS}[name]
    with mutant(name):
        search = Search([start()], events.split())
        with pytest.raises(LossError) as found:
            search.run(length)
        print(found.value)
    # The same events, and nothing taken out.
    Search([start()], events.split()).run(length)
