"""Every order of events of small clusters: the real cores, all states by breadth first (24).

`explorer.py` states the abstraction, `scopes.py` the clusters, docs/decisions/wal-quorum.md the figures.
"""

from pathlib import Path

import pytest

from tests.support.quorum.explore import explore
from tests.support.quorum.mutants import mutant
from tests.support.quorum.scopes import FOUND_IN, SCOPES
from tests.support.quorum.search import Search, ViolationError, resumed

pytestmark = pytest.mark.exhaustive


def explored(name: str) -> Search:
    search = Search(SCOPES[name])
    search.run()
    print(f"{name}: {search.report()}")
    return search


@pytest.mark.parametrize(
    "name", ["rivals", "tail", "version", "figure 8", "ahead", "resumption", "strangers"]
)
def test_24_no_order_of_events_breaks_the_rules(name: str) -> None:
    assert explored(name).complete


@pytest.mark.parametrize("name", FOUND_IN)
def test_24_the_explorer_finds_the_mutant(name: str) -> None:
    with mutant(name), pytest.raises(ViolationError) as found:
        explored(FOUND_IN[name])
    print(found.value)


def test_24_a_search_that_was_stopped_goes_on(tmp_path: Path) -> None:
    whole = explored("rivals")
    search = Search(SCOPES["rivals"], traced=False)
    while not search.complete:
        search.step(3000)
        search.save(tmp_path)
        again = resumed(tmp_path)
        assert again is not None
        search = again
    assert (search.states, search.depth) == (whole.states, whole.depth)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["2 terms", "2 terms, promoted", "2 terms, a break"])
def test_24_two_terms_two_proposers_two_lsns(name: str) -> None:
    search = Search(SCOPES[name], traced=False)
    search.run()
    print(f"{name}: {search.report()}")
    assert search.complete


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["3 terms", "3 terms, promoted"])
def test_24_three_terms_three_lsns(name: str) -> None:
    """Ten minutes each; `python -m tests.support.quorum.explore` goes on from there."""
    search = explore(name, Path(".cache/explored"), 600)
    assert search.states > 100_000 or search.complete
