"""One read of the primary for all candidates: never older than what it is wanted for, and a failure is shared."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slot_sync.controller import Controller
from slot_sync.plan import FailoverCandidate, SlotSyncPlan
from slot_sync.probe import shared as shared_probe
from slot_sync.probe.shared import SharedProbe
from slot_sync.probe.standby import StandbyProbe
from slot_sync.report import SlotReport
from slot_sync.resolver.observed import ObservedPrimary, Selection, Upstream
from tests.support.waiting import wait_for
from walsender_bridge.errors import ConnectionFailedError, TusklineError

PRIMARY = ObservedPrimary(7, 1, False, 1, 160_014, "logical", 0x5000000)


class FakeLook:
    """In the place of `PrimaryProbe`: each read is `answer()`; the moments at which they began."""

    began: list[float] = []  # noqa: RUF012  # of all of them, set anew by the fixture
    answer: Callable[[], ObservedPrimary]

    def __init__(self, dsn: str, *, wants_turn: bool = False) -> None:
        self.where = dsn
        self.has_turn = False
        self._wants_turn = wants_turn

    def read(self) -> ObservedPrimary:
        self.began.append(time.monotonic())
        found = type(self).answer()
        self.has_turn = self._wants_turn
        return found

    def close(self) -> None:
        pass


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    monkeypatch.setattr(FakeLook, "began", [])
    monkeypatch.setattr(FakeLook, "answer", staticmethod(lambda: PRIMARY), raising=False)
    monkeypatch.setattr(shared_probe, "PrimaryProbe", FakeLook)
    return FakeLook.began


def test_who_wants_it_from_a_moment_on_gets_nothing_older(reads: list[float]) -> None:
    with SharedProbe("primary", wants_turn=True) as shared:
        moment = time.monotonic()
        assert shared.since(moment) is PRIMARY
        assert shared.since(moment) is PRIMARY
        assert shared.since(float("-inf")) is PRIMARY
        assert len(reads) == 1
        assert shared.has_turn
        shared.since(time.monotonic())
        assert len(reads) == 2
        assert reads[0] >= moment


def test_those_who_come_meanwhile_wait_for_the_same(
    reads: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()

    def slow() -> ObservedPrimary:
        go.wait(10)
        raise ConnectionFailedError("no answer", where="primary")

    monkeypatch.setattr(FakeLook, "answer", staticmethod(slow))
    errors: list[TusklineError] = []
    with SharedProbe("primary", wants_turn=True) as shared:
        moment = time.monotonic()

        def want() -> None:
            try:
                shared.since(moment)
            except TusklineError as error:
                errors.append(error)

        threads = [threading.Thread(target=want) for _ in range(3)]
        for thread in threads:
            thread.start()
        go.set()
        for thread in threads:
            thread.join(10)
        assert len(errors) == 3
        assert len(reads) == 1
        assert not shared.has_turn


def test_candidates_look_at_the_same_moments(
    reads: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However long each of them takes: the primary is asked once at each."""

    def read(self: StandbyProbe) -> None:
        time.sleep(0.07 if "slow" in self.where else 0.001)
        raise ConnectionFailedError("no answer", where=self.where)

    monkeypatch.setattr(StandbyProbe, "read", read)
    names = ("one", "two", "slow")
    candidates = tuple(
        FailoverCandidate(name, f"host=127.0.0.1 dbname={name}", name) for name in names
    )
    plan = SlotSyncPlan("host=127.0.0.1", candidates, Selection(), tmp_path, poll=0.05)
    reports: list[SlotReport] = []
    stop = threading.Event()
    with Controller(plan) as controller:
        began = time.monotonic()
        thread = threading.Thread(target=controller.watch, args=(stop, reports.append))
        thread.start()
        # A busy machine polls less often: so many reads are waited for, and not a second.
        wait_for(lambda: len(reads) > 10, 30, "some polls")
        wait_for(lambda: reports and set(reports[-1].rounds) == set(names), 30, "all report")
        stop.set()
        thread.join(10)
        polls = (time.monotonic() - began) / plan.poll
    assert len(reads) <= polls + 1


def test_an_upstream_is_asked_once_for_each_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    answers = [None, Upstream(1, True, 5), Upstream(1, False, 5), Upstream(1, False, 6)]

    def ask(self: StandbyProbe, at: tuple[str, int]) -> Upstream | None:
        asked.append(at)
        return answers[len(asked) - 1]

    monkeypatch.setattr(StandbyProbe, "_ask", ask)
    at = ("127.0.0.1", 5432)

    with StandbyProbe("host=127.0.0.1", "host=127.0.0.1") as probe:
        # Nobody answered, or a standby, which may be promoted while the connection lasts: it is asked again.
        assert probe._upstream_of({"pid": 7}, 100, at) is None
        assert probe._upstream_of({"pid": 7}, 100, at) == answers[1]
        for _ in range(3):
            assert probe._upstream_of({"pid": 7}, 100, at) == answers[2]
        assert len(asked) == 3
        assert probe._upstream_of({"pid": 8}, 101, at) == answers[3]
        answers.append(Upstream(1, False, 7))
        # Whoever may not see when the receiver began cannot tell it from another.
        assert probe._upstream_of({"pid": 8}, None, at) == answers[4]
        assert len(asked) == 5
