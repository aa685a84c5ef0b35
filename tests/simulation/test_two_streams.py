"""Two streams of a log: one is sealed, and the other goes on (19, 20, I3, I4, I9)."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from tests.support.log_runs import check_found, run
from tests.support.log_two_streams import TwoStreamsWorld
from walsender_bridge.change_log.protocol import ReplicaReport
from walsender_bridge.change_log.repository.core import Repository, StreamState


def test_19_a_stream_goes_on_while_another_one_is_sealed(seed: int) -> None:
    happened: Counter[str] = Counter()
    for number in range(seed * 1_000_000, seed * 1_000_000 + 40):
        happened += run(TwoStreamsWorld, number).happened
    print(dict(happened))
    assert happened["went on"] > 20


def test_one_seed_has_the_same_two_streams_each_time() -> None:
    first, second = run(TwoStreamsWorld, 5), run(TwoStreamsWorld, 5)
    assert (first.records, first.placed) == (second.records, second.placed)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(20))
def test_ten_thousand_seeds(seed: int, chunk: int) -> None:
    first = seed * 1_000_000 + 10_000 + chunk * 500
    for number in range(first, first + 500):
        run(TwoStreamsWorld, number)


# -- mutants ----------------------------------------------------------------------------------------

_Ready = dict[str, ReplicaReport]
_really = Repository._committable


def _stops_all(its: Repository, reports: Sequence[ReplicaReport]) -> _Ready:
    return {} if any(each.sealed for each in its.streams.values()) else _really(its, reports)


def _any_term(its: StreamState, report: ReplicaReport) -> bool:
    return report.version >= its.last.context.version


def _waits_for_all(its: Repository, applied: Mapping[tuple[str, str], int]) -> int:
    """As if a member had to know a version by which nothing of its stream was committed."""
    known = [
        applied.get((name, each), stream.applied.get(each, 0))
        for name, stream in its.streams.items()
        for each in stream.members
    ]
    return max(its.published, min([its.version, *known]))


MUTANTS: dict[str, tuple[type, str, Callable[..., object]]] = {
    "a stream that is sealed stops all": (Repository, "_committable", _stops_all),
    "a report counts with any term": (StreamState, "counts", _any_term),
    "all members have to know a version": (Repository, "_published", _waits_for_all),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_19_the_simulator_finds_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    check_found(TwoStreamsWorld, name, 300)
