"""What the log says of a log server that does not answer: nothing while it starts beside its bridge, then once."""

from dataclasses import replace

import pytest
import structlog

from walsender_bridge.change_log import actions
from walsender_bridge.change_log.log_server_messages import CommitAnswer, ReportAnswer
from walsender_bridge.change_log.protocol import START, ReplicaReport
from walsender_bridge.change_log.repository.log_server_link import LogServerLink
from walsender_bridge.errors import MalformedMessageError, UnavailableError

ERROR = UnavailableError("does not answer", repair="see that it runs there")


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> LogServerLink:
    """A log server of a bridge that was started at second 0; `_now` is the time."""
    monkeypatch.setattr(
        "walsender_bridge.change_log.repository.log_server_link.time.monotonic", lambda: 0.0
    )
    return LogServerLink("grpc://127.0.0.1:1")


def warnings(link: LogServerLink, monkeypatch: pytest.MonkeyPatch, now: float) -> int:
    monkeypatch.setattr(
        "walsender_bridge.change_log.repository.log_server_link.time.monotonic", lambda: now
    )
    with structlog.testing.capture_logs() as logs:
        link.lost(ERROR)
    assert not link.answers
    assert all(line["repair"] == ERROR.repair for line in logs)
    return len(logs)


def test_a_log_server_that_starts_is_not_warned_of(
    link: LogServerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [warnings(link, monkeypatch, now) for now in (0.1, 5, 29.9)] == [0, 0, 0]


def test_one_that_never_answers_is_warned_of_once(
    link: LogServerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [warnings(link, monkeypatch, now) for now in (1, 30.1, 31, 100)] == [0, 1, 0, 0]


def test_one_that_has_answered_is_warned_of_at_once_and_each_time(
    link: LogServerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actions, "call", lambda *_: ReportAnswer("k", ()))
    for now in (1.0, 2.0):
        link.report()
        assert [warnings(link, monkeypatch, now) for _ in range(2)] == [1, 0]


def _report(replica: str, length: int = 0) -> ReplicaReport:
    return ReplicaReport(replica, "shop", "log", 1, 0, 1, length, START, 1)


@pytest.mark.parametrize("others", [(_report("b"),), (_report("a"), _report("b"))])
def test_a_log_server_speaks_for_its_own_replicas_alone(
    link: LogServerLink, monkeypatch: pytest.MonkeyPatch, others: tuple[ReplicaReport, ...]
) -> None:
    """Each report is a vote for a commit: with a second one, entries would be committed that one replica has."""
    refused = pytest.raises(MalformedMessageError, match="log server a reports a replica of")
    others = tuple(replace(each, stream=f"s{at}") for at, each in enumerate(others))
    monkeypatch.setattr(actions, "call", lambda *_: ReportAnswer("a", others))
    with refused:
        link.report()
    assert link.log_server_id == ""
    link.log_server_id = "a"
    monkeypatch.setattr(actions, "call", lambda *_: CommitAnswer(others, {}))
    with refused:
        link.commit({"shop": ()}, 1.0)


def test_a_log_server_has_one_report_for_a_stream(
    link: LogServerLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = (_report("a", 1), _report("a", 7))
    monkeypatch.setattr(actions, "call", lambda *_: ReportAnswer("a", both))
    assert link.report() == [both[1]]
