"""A stream on two or three log servers: every order of events of small configurations, with the real cores (I1 to I14).

`log_explored.py` states what is enumerated. The mutants are those of the simulation.
"""

import pytest

from tests.simulation.test_replicated_log import MUTANTS
from tests.support.log_explored import Explored, Found, Scope, committed, explore

ALL = "klm"
#: Before the search: entries that are written by the first writer, and an earlier commit.
_WRITTEN = ("write, term 1", *(f"append of term 1 at {name}" for name in ALL))
_COMMITTED = committed(ALL, term=1)
_TRIMMED = (*_COMMITTED * 4, *(f"report of {name}" for name in ALL), "tick", "trim")
_SEALED = ("seal", "deliver seal_one l", "deliver seal_one m")
_SYNCHRONIZING = (
    "k loses its disk",
    *_SEALED,
    "unseal",
    "assign",
    "synchronize k1 with l",
)
_REPORTED = (
    "write, term 1",
    "append of term 1 at k",
    "append of term 1 at l",
    "report of k",
    "report of l",
)

SCOPES = {
    "two writers": Scope("kl", writes=2),
    "three replicas": Scope(ALL, writes=1, seals=0),
    "crashes": Scope("kl", faults=("crash", "repository")),
    "a repository fails over": Scope("kl", 1, 1, ("leader",)),
    "reported, and sealed": Scope("kl", 0, 1, ("crash",), start=_REPORTED),
    "a writer returns": Scope(
        "kl", 1, 0, ("reopen",), start=("seal", "deliver seal_one k", "deliver seal_one l")
    ),
    "a disk is lost": Scope(ALL, 0, 1, ("disk",), start=_COMMITTED),
    "entries are lost": Scope(ALL, 0, 1, ("entries",), start=(*_COMMITTED, *_WRITTEN * 3)),
    "a synchronization": Scope(
        ALL, 0, 0, ("crash", "entries"), start=(*_COMMITTED * 2, *_SYNCHRONIZING, *_SEALED)
    ),
    "a synchronization, trimmed": Scope(
        ALL, 0, 0, ("repository",), start=(*_TRIMMED, *_SYNCHRONIZING, *_SEALED), finish=3
    ),
}

#: The scope in which a mutant is found.
FOUND_IN = {
    "a report counts with any term": "reported, and sealed",
    "a commit does not need every member": "three replicas",
    "an old leader's writes take effect": "a repository fails over",
    "any writer unseals": "a writer returns",
    "a damaged replica takes the rest of a synchronization": "a synchronization",
    "Varlog 1: a crash in the middle of a synchronization is the end": "a synchronization, trimmed",
    "Varlog 2: sealed without data behind a wipe": "a synchronization",
    "Varlog 3: lost entries are taken for trimmed ones": "entries are lost",
    "Varlog 4: a hole within the entries is sealed": "entries are lost",
    "Varlog 5: a rejected tail stays on disk": "reported, and sealed",
}


def explored(name: str, most: int) -> Explored:
    found = explore(SCOPES[name], most)
    print(f"{name}: {found}")
    return found


@pytest.mark.parametrize("name", SCOPES)
def test_no_order_of_events_of_a_small_stream_breaks_an_invariant(name: str) -> None:
    found = explored(name, 500)
    assert found.complete or found.states >= 500
    assert found.finished >= 2


@pytest.mark.parametrize("name", MUTANTS)
def test_the_explorer_finds_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    with pytest.raises(Found) as found:
        explored(FOUND_IN[name], 4000)
    print(found.value)


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCOPES)
def test_no_order_of_very_many_events_breaks_an_invariant(name: str) -> None:
    found = explored(name, 40_000)
    assert found.complete or found.states >= 40_000
