"""Which replicas go on, which are taken back, and which log servers are assigned: `membership.py`."""

from dataclasses import replace

import pytest

from walsender_bridge.change_log.repository.core import StreamState
from walsender_bridge.change_log.repository.membership import (
    LONGEST_RETRY,
    RELIABLE,
    SEALED_SECONDS,
    Assign,
    Decision,
    LeaveOut,
    LogServerView,
    Membership,
    ReplicationPolicy,
    SealAgain,
    TakeBack,
)

POLICY = ReplicationPolicy(replicas=3, min_replicas=2, silence=10.0)
ADDRESSES = {name: f"at-{name}" for name in "klmn"}


class Case:
    """A stream on k, l and m, and what their log servers send."""

    def __init__(self, *, members: str = "klm", policy: ReplicationPolicy = POLICY) -> None:
        self.stream = StreamState(tuple("klm"), tuple(members))
        self.membership = Membership(policy)
        self.configured = [ADDRESSES[each] for each in "klm"]
        self.looked = 0.0
        self.views: list[LogServerView] = []

    def at(
        self,
        now: float,
        reporting: str,
        learning: str = "",
        owes: dict[str, float] | None = None,
        *,
        suspended: bool = False,
    ) -> list[Decision]:
        """What a look at this time decides. Until then others found the same as the last one, unless `suspended`."""
        while self.views and not suspended and self.looked + 0.5 < now:
            self._look(self.looked + 0.5)
        self.views = [
            LogServerView(
                each,
                ADDRESSES[each],
                frozenset("s" if each in reporting else ""),
                (owes or {}).get(each),
            )
            for each in reporting + learning
        ]
        return self._look(now)

    def _look(self, now: float) -> list[Decision]:
        self.looked = now
        streams = {"s": self.stream}
        return self.membership.step(now, streams, ADDRESSES, self.views, self.configured)


def test_a_member_is_left_out_when_it_has_been_silent_and_others_suffice() -> None:
    case = Case()
    assert case.at(0, "klm") == []
    assert case.at(1, "kl") == []
    assert case.at(10.9, "kl") == []
    assert case.at(11, "kl") == [LeaveOut("s", ("m",))]
    # An answer begins the count again; one that answers without a report is silent, too.
    assert case.at(12, "klm") == []
    assert case.at(13, "kl", learning="m") == []
    assert case.at(23, "kl", learning="m") == [LeaveOut("s", ("m",))]


def test_a_member_is_silent_since_the_request_that_it_does_not_answer() -> None:
    case = Case()
    for now in (2, 3):
        assert case.at(now, "klm", owes={"m": 0.5}) == []
    # The request has failed after its own five seconds, and the next one is not answered either.
    assert case.at(6, "kl") == []
    assert case.at(10.4, "kl") == []
    assert case.at(10.5, "kl") == [LeaveOut("s", ("m",))]


def test_a_member_that_answers_late_each_time_stays() -> None:
    case = Case()
    for now in range(0, 60, 3):
        assert case.at(now + 2, "klm", owes={"m": float(now)}) == []


def test_one_look_after_a_pause_of_the_repository_leaves_nobody_out() -> None:
    case = Case()
    assert case.at(0, "klm") == []
    assert case.at(100, "klm", owes={"m": 1.0}, suspended=True) == []
    assert case.at(101, "klm") == []
    # It does not count as one of those that go on, either.
    case = Case()
    for now in (2, 11):
        assert case.at(now, "klm", owes={"l": 1.0, "m": 1.0}) == []


@pytest.mark.parametrize("pending", [False, True])
def test_one_that_was_slow_before_a_pause_of_the_repository_stays(*, pending: bool) -> None:
    case = Case()
    assert case.at(0, "klm") == []
    assert case.at(1.5, "klm", owes={"m": 0.2}) == []
    # The request is still pending, or has failed at its deadline and the next one is under way.
    found = ("klm", "", {"m": 0.2}) if pending else ("kl", "", None)
    assert case.at(61.5, *found, suspended=True) == []
    assert case.at(68, *found) == []
    # It has been silent while the repository ran, too.
    assert case.at(72, *found) == [LeaveOut("s", ("m",))]


def test_a_repository_that_looks_seldom_still_leaves_out_who_is_silent() -> None:
    case, now = Case(), 0.0
    while not case.at(now, "klm" if not now else "kl", suspended=True):
        now += 5
        assert now < 60


def test_a_stream_that_was_sealed_while_the_repository_paused_is_left_alone() -> None:
    case = Case()
    case.stream.sealed, case.stream.term = True, 4
    assert case.at(0, "klm") == []
    assert case.at(60, "klm", suspended=True) == []
    assert case.at(60 + SEALED_SECONDS, "klm") == [SealAgain("s")]


def test_not_fewer_than_min_replicas_are_left() -> None:
    case = Case()
    for now in (0, 100):
        assert case.at(now, "k") == []
    # A stream that never had so many goes on with what it has.
    case.stream.members = ("k",)
    assert case.at(200, "klm") == [TakeBack("s", "l"), TakeBack("s", "m")]
    assert POLICY.least(case.stream) == 1


def test_a_member_that_lost_its_replica_is_synchronized_if_too_few_others_report() -> None:
    case = Case()
    for now in (0, 9.9):
        assert case.at(now, "k", learning="l") == []
    assert case.at(10, "k", learning="l") == [TakeBack("s", "l")]
    # Nobody could send it anything.
    case = Case()
    for now in (0, 10):
        assert case.at(now, "", learning="kl") == []


def test_a_stream_that_stays_sealed_is_sealed_again() -> None:
    case = Case()
    case.stream.sealed, case.stream.term = True, 4
    assert case.at(0, "klm") == []
    assert case.at(SEALED_SECONDS - 1, "klm") == []
    # Somebody works on it.
    case.stream.term = 5
    assert case.at(SEALED_SECONDS + 1, "klm") == []
    assert case.at(2 * SEALED_SECONDS - 1, "klm") == []
    assert case.at(2 * SEALED_SECONDS, "klm") == [SealAgain("s")]
    case.stream.sealed = False
    assert case.at(3 * SEALED_SECONDS, "klm") == []


def test_a_replica_outside_is_taken_back_later_and_later() -> None:
    case, now, pauses = Case(members="kl"), 0.0, []
    for _ in range(9):
        assert case.at(now, "klm") == [TakeBack("s", "m")]
        case.membership.failed(now, "s", "m")
        began = now
        while not case.at(now, "klm"):
            now += 0.25
        pauses.append(now - began)
    assert pauses == [1, 2, 4, 8, 16, 32, LONGEST_RETRY, LONGEST_RETRY, LONGEST_RETRY]
    # It is in sync, and fails at once: that is no reason to begin with short pauses again.
    case.membership.taken_back(now, "s", "m")
    case.membership.failed(now + 5, "s", "m")
    assert case.at(now + 5 + LONGEST_RETRY - 1, "klm") == []
    case.membership.taken_back(now + 100, "s", "m")
    case.membership.failed(now + 100 + RELIABLE, "s", "m")
    assert case.at(now + 100 + RELIABLE + 1, "klm") == [TakeBack("s", "m")]


def test_nobody_is_taken_back_who_does_not_answer() -> None:
    assert Case(members="kl").at(0, "kl") == []


def test_a_log_server_that_is_away_is_not_replaced_unless_its_address_has_another() -> None:
    case = Case(members="kl")
    case.configured.append(ADDRESSES["n"])
    assert case.at(1000, "kln") == []
    # The disk of m was replaced: the log server at its address has a new id.
    views = [LogServerView(each, ADDRESSES[each], frozenset("s")) for each in "kl"]
    views.append(LogServerView("new", ADDRESSES["m"], frozenset()))
    found = case.membership.step(0, {"s": case.stream}, ADDRESSES, views, case.configured)
    assert found == [Assign("s", ("k", "l", "new"))]


def test_a_log_server_that_was_removed_from_the_configuration_is_replaced() -> None:
    case = Case(members="kl")
    case.configured = [ADDRESSES[each] for each in "kln"]
    assert case.at(0, "kln") == [Assign("s", ("k", "l", "n"))]
    # Not a member: that has to be left out first.
    case = Case(members="klm")
    case.configured = [ADDRESSES[each] for each in "kln"]
    assert case.at(0, "kln") == []


def test_a_stream_gets_more_replicas_where_the_fewest_are() -> None:
    case = Case()
    alone = StreamState(("k",), ("k",))
    views = [LogServerView(each, ADDRESSES[each], frozenset()) for each in "klmn"]
    streams = {"s": alone, "busy": StreamState(("l",), ("l",))}
    configured = [*ADDRESSES.values()]
    found = case.membership.step(0, streams, ADDRESSES, views, configured)
    assert found == [Assign("busy", ("l", "m", "n")), Assign("s", ("k", "m", "n"))]
    one = Membership(replace(POLICY, replicas=1))
    assert one.step(0, streams, ADDRESSES, views, configured) == []
