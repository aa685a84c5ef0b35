"""Why streams stand still, from the evaluations on reports and from which log servers answer."""

from dataclasses import dataclass, field, replace

from structlog.testing import capture_logs

from tests.unit.test_repository import log_of, report, tick
from walsender_bridge.change_log.log_server_messages import ReplicaDescription, ReplicasAnswer
from walsender_bridge.change_log.repository.core import (
    LogServerSeen,
    Repository,
    StreamSealed,
    StreamState,
    StreamUnsealed,
)
from walsender_bridge.change_log.repository.status import describe
from walsender_bridge.change_log.repository.stream_faults import AWAY_SECONDS, StreamFaults
from walsender_bridge.errors import (
    ConfigError,
    DivergedError,
    InvalidReplicaError,
    TusklineError,
    UnavailableError,
    UntrustedServiceError,
)
from walsender_bridge.observability.log_view import LogView


@dataclass
class LogServer:
    log_server_id: str = "k"
    address: str = "grpc://here:1"
    answers: bool = True
    heard: bool = True
    problem: TusklineError | None = None
    refused: dict[str, TusklineError] = field(default_factory=dict)


class Case:
    """The faults of a log with streams a and b, whose newest version is 1."""

    def __init__(self) -> None:
        self.now = 0.0
        self.state: Repository = log_of("a", "b")
        tick(self.state, report("a", 0, 1, 2), report("b", 0, 1, 2))
        self.faults = StreamFaults(clock=lambda: self.now)

    def found(self, *log_servers: LogServer) -> dict[str, TusklineError]:
        state = self.state
        return self.faults.faults(state.streams, log_servers or (LogServer(),), state.log_servers)


def test_a_log_that_is_well_has_no_faults() -> None:
    case = Case()
    reports = [report("a", 1, 3, 1), report("b", 0, 1, 2)]
    assert case.faults.note(case.state.evaluate(reports)) == reports
    assert case.found() == {}
    assert not case.faults.diverged


def test_a_log_server_that_runs_in_a_copy_of_another_is_told_before_all_that_comes_of_it() -> None:
    """The copy's reports are older: they said that the log was to be put back, and the log was whole."""
    case = Case()
    case.faults.note(case.state.evaluate([report("a", 1, 3, 1), report("a", 0, 1, 2)]))
    copy = LogServer(address="grpc://copy:1", refused={"a": InvalidReplicaError("does not follow")})
    for log_servers in ((LogServer(), copy), (copy, LogServer())):
        fault = case.found(*log_servers)["a"]
        assert isinstance(fault, ConfigError)
        assert "grpc://here:1" in fault.what
        assert "grpc://copy:1" in fault.what
        assert "have the same id k" in fault.what
    copy.answers = False
    assert case.faults.note(case.state.evaluate([report("a", 1, 3, 1)]))
    assert case.found(LogServer(), copy) == {}


def test_a_replica_of_a_stream_that_the_repository_has_lost_stops_the_versions() -> None:
    """The copy that was put back is older than the stream; made again on another log server, it began with version 1."""
    for lost in (report("c", 9, 3, 1), report("a", 9, 3, 1, log_server="other")):
        case = Case()
        assert case.faults.note(case.state.evaluate([lost])) == []
        assert case.faults.diverged
        refusal = case.faults.refusal(case.state.streams, [LogServer()])
        assert isinstance(refusal, DivergedError)
        assert {type(fault) for fault in case.found().values()} == {DivergedError}
    # A replica of another log says nothing of this one.
    case = Case()
    case.faults.note(case.state.evaluate([replace(report("a", 9, 3, 1), log_id="another")]))
    assert not case.faults.diverged
    # Such are all of them once an empty repository was started after a loss.
    assert "`tuskline log rebuild`" in case.found()["a"].repair


def test_a_replica_ahead_of_the_repository_stops_every_stream_by_name() -> None:
    case = Case()
    well = report("b", 1, 3, 1)
    assert case.faults.note(case.state.evaluate([report("a", 9, 3, 1), well])) == [well]
    assert case.faults.diverged
    found = case.found()
    assert isinstance(found["a"], DivergedError)
    assert "version 9 was never issued; the newest is 1" in found["a"].what
    assert "grpc://here:1" in found["a"].where
    assert "docs/log-lost.md" in found["a"].repair
    assert isinstance(found["b"], DivergedError)
    assert "stream a has diverged" in found["b"].what
    # It stays so while the replica says nothing, and ends when it fits again.
    case.faults.note(case.state.evaluate([well]))
    assert case.faults.diverged
    case.faults.note(case.state.evaluate([report("a", 1, 3, 0)]))
    assert case.found() == {}


def test_a_replica_that_does_not_fit_is_its_own_streams_fault_alone() -> None:
    case = Case()
    case.faults.note(case.state.evaluate([report("a", 1, 4, 1)]))
    assert not case.faults.diverged
    found = case.found()
    assert list(found) == ["a"]
    assert "at version 1 the stream ends at 3, the replica at 4" in found["a"].what


def test_no_version_is_issued_before_all_that_have_replicas_were_heard() -> None:
    case = Case()
    away = LogServer("", "grpc://there:1", answers=False, heard=False)
    streams = case.state.streams
    refusal = case.faults.refusal(streams, [away])
    assert isinstance(refusal, UnavailableError)
    assert refusal.where == "grpc://there:1"
    assert case.faults.refusal(streams, [LogServer(), away]) is None, "it has none of the replicas"
    assert case.faults.refusal({}, [away]) is None
    case.state = log_of("a")
    other = {"b": StreamState(("other",), ("other",))}
    assert case.found(LogServer(), away) == {}
    assert case.faults.refusal({**streams, **other}, [LogServer(), away]) is not None
    # A log server that lost its identity is known to have: it is that stream's fault alone.
    assert case.faults.refusal({**streams, **other}, [LogServer(), LogServer("new")]) is None
    # A log server that is only restarted is no fault yet.
    assert case.faults.faults({**streams, **other}, [LogServer(), away], {}) == {}
    case.now += AWAY_SECONDS
    found = case.faults.faults({**streams, **other}, [LogServer(), away], {})
    assert "has not answered since the repository started" in found["a"].what


def test_a_log_server_with_another_id_is_told_the_id_that_it_had() -> None:
    case = Case()
    log_server = LogServer(log_server_id="x")
    case.faults.note(case.state.evaluate([report("a", 1, 3, 0, log_server="x")]))
    found = case.found(log_server)
    assert isinstance(found["a"], ConfigError)
    assert '"log_server_id": "k"' in found["a"].repair
    # Of stream b it has nothing at all.
    assert isinstance(found["b"], DivergedError)
    assert (
        "the replica is on log server k, which is not among the log servers x at grpc://here:1"
        in (found["b"].what)
    )


def test_a_copy_in_the_place_of_another_log_server_is_named_and_logged_once() -> None:
    case = Case()
    case.state = log_of("a", log_servers=("k", "l"))
    case.state.apply(LogServerSeen("l", "grpc://there:1"))
    copy = LogServer("k", "grpc://there:1")
    with capture_logs() as said:
        for _ in range(3):
            case.found(LogServer(), copy)
        copy.answers = False
        case.found(LogServer(), copy)
        copy.answers = True
        case.found(LogServer(), copy)
    lines = [each for each in said if each["event"] == "log servers with the same id"]
    assert len(lines) == 2, "once each time that it begins"
    assert "grpc://there:1" in lines[0]["reason"]
    answer = describe(case.state, {}, {}, [LogServer(), copy], 0.0, 0.0)
    (place,) = [each for each in answer.streams[0].replicas if each.log_server == "l"]
    assert place.failure is not None
    assert place.failure.what == "another log server, k, answers there"
    replica = ReplicaDescription("a", "APPENDABLE", "", "", None, None, None, None, 0)
    seen = LogView(answer, {"grpc://there:1": ReplicasAnswer("k", (replica,))})
    assert isinstance(seen.replica("a", place), ConfigError), "the exit code of log verify"


def test_a_log_server_whose_certificate_is_not_accepted_is_named_with_the_reason() -> None:
    case = Case()
    problem = UntrustedServiceError("not valid for '10.0.0.3'", repair="issue another one")
    refused = LogServer(answers=False, problem=problem)
    case.state.apply(LogServerSeen("k", refused.address))
    case.found(refused)
    case.now = AWAY_SECONDS
    fault = case.found(refused)["a"]
    assert fault.what == "its log server is not accepted: not valid for '10.0.0.3'"
    assert fault.repair == "issue another one"
    refused.heard = False
    waits = case.faults.refusal(case.state.streams, [refused])
    assert waits is not None
    assert "not valid for '10.0.0.3'" in waits.what
    (described,) = describe(case.state, {}, {}, [refused], 0.0, 0.0).streams[:1]
    failure = described.replicas[0].failure
    assert failure is not None
    assert failure.what == "not valid for '10.0.0.3'"


def test_a_log_server_that_is_away_is_a_fault_when_that_takes_longer_than_its_restart() -> None:
    case = Case()
    away = LogServer(answers=False)
    assert case.found(away) == {}
    case.now = AWAY_SECONDS - 1
    assert case.found(away) == {}
    case.now = AWAY_SECONDS
    assert isinstance(case.found(away)["a"], UnavailableError)
    assert case.found() == {}
    assert case.found(away) == {}


def test_a_commit_that_the_replica_refuses_is_its_streams_fault() -> None:
    case = Case()
    refusal = InvalidReplicaError("commit 2 does not follow", where="stream b")
    assert case.found(LogServer(refused={"b": refusal})) == {"b": refusal}


def test_a_stream_that_stays_sealed_is_a_fault() -> None:
    case = Case()
    case.state.apply(StreamSealed("a", 7))
    assert case.found() == {}
    case.now += AWAY_SECONDS
    (fault,) = case.found().values()
    assert "the stream is sealed" in fault.what
    assert fault.where == "stream a"
    case.state.apply(StreamUnsealed("a", 7, ("k",)))
    assert case.found() == {}
    case.state.apply(StreamSealed("a", 8))
    case.now += 1
    assert case.found() == {}, "its time begins again"


def test_a_replica_that_is_away_is_not_taken_for_the_one_that_answers() -> None:
    """Nobody is told to give a log server the identity of another."""
    case = Case()
    case.state = log_of("a", log_servers=("k", "l"))
    case.state.apply(LogServerSeen("l", "grpc://there:1"))
    case.faults.note(case.state.evaluate([report("a", 0, 1, 0)]))
    away = LogServer("l", "grpc://there:1", answers=False)
    assert case.found(LogServer(), away) == {}
    case.now += AWAY_SECONDS
    (fault,) = case.found(LogServer(), away).values()
    assert fault.what == "its log server does not answer"
    assert fault.where == "stream a, log server grpc://there:1"
    # The repository was restarted, and nobody has told it yet who is at that address.
    (again,) = case.found(LogServer(), replace(away, log_server_id="")).values()
    assert again.where == fault.where
