"""A stream with fewer replicas in sync than it should have: named with its repair, and no reason to count as dead."""

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support import statuses
from tests.support.http_service import served
from walsender_bridge.change_log.repository_messages import ReplicaPlace, StreamDescription
from walsender_bridge.errors import UntrustedServiceError
from walsender_bridge.observability import metrics, quorum_metrics
from walsender_bridge.observability.observation import Observation, Process
from walsender_bridge.observability.quorum_view import QuorumView
from walsender_bridge.observability.replica_view import StreamReplicas, of_streams
from walsender_bridge.runtime.error_record import ErrorRecord


def place(number: int, *, in_sync: bool = True, answers: bool = True) -> ReplicaPlace:
    return ReplicaPlace(f"id-{number}", f"grpc://10.0.0.{number}:7401", answers, 5, in_sync)


def stream(*places: ReplicaPlace) -> StreamDescription:
    return StreamDescription("shop", 1, 5, 5, 900, 0x1430, 0, 5, 900, 1, 1, places)


def observed(*replicas: StreamReplicas) -> Observation:
    """A machine on which nothing else is amiss."""
    process = Process("up", 1, "running", 0, None, 0.0)
    return Observation(0.0, 1, [process], [], None, None, lake_configured=False, replicas=replicas)


@contextlib.contextmanager
def served_at(seen: Observation) -> Iterator[int]:
    """The port at which this observation is read."""
    shared = SimpleNamespace(latest=lambda: seen)
    with metrics.Endpoint(("127.0.0.1", 0), shared) as server, served(server):  # type: ignore[arg-type]
        yield server.server_port


def is_red(seen: Observation, reason: str) -> None:
    """/readyz and the metrics say so, and nothing else is wrong."""
    assert seen.problems == [reason]
    with served_at(seen) as port:
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10)
        with caught.value as refused:
            assert refused.code == 503
            assert json.load(refused) == {
                "ready": False,
                "reasons": [reason],
                "degraded": seen.degraded,
            }
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert "\ntuskline_ready 0.0\n" in answer.read().decode()


def test_replicas_in_sync_are_nothing_to_say():
    assert observed(*of_streams([stream(place(1), place(2))], 2)).degraded == []


def test_a_log_server_that_does_not_answer_is_named_with_the_stream():
    replicas = of_streams([stream(place(1), place(2, in_sync=False, answers=False))], 2)
    short, out = observed(*replicas).degraded
    assert short == "log: stream shop has 1 of 2 replicas in sync"
    assert "at grpc://10.0.0.2:7401 is not in sync, and its log server does not answer" in out
    assert "; run tuskline up on its machine" in out


def test_a_log_server_whose_certificate_is_not_accepted_is_named_with_the_reason():
    why = ErrorRecord.of(UntrustedServiceError("lacks the role log-server", repair="issue another"))
    away = replace(place(2, in_sync=False, answers=False), failure=why)
    _, out = observed(*of_streams([stream(place(1), away)], 2)).degraded
    assert "its log server is not accepted: lacks the role log-server" in out
    assert "issue another" in out
    assert "does not answer" not in out


def test_a_replica_that_is_synchronized_is_waited_for():
    (_, out) = observed(*of_streams([stream(place(1), place(2, in_sync=False))], None)).degraded
    assert out.startswith(
        "log: the replica of stream shop at grpc://10.0.0.2:7401 is not in sync; "
    )
    assert "tuskline log status shows its lag" in out


def test_a_replica_that_could_not_be_synchronized_is_named_with_the_cause():
    full = ErrorRecord("DISK_FULL", "the disk is full", "", "free disk space there")
    replicas = of_streams([stream(place(1), replace(place(2, in_sync=False), failure=full))], 2)
    (_, out) = observed(*replicas).degraded
    assert out.endswith(
        " is not in sync, and could not be synchronized: the disk is full; free disk space there; it is tried again"
    )


def test_a_stream_on_too_few_log_servers_needs_another_one():
    (short,) = observed(*of_streams([stream(place(1), place(2))], 3)).degraded
    assert short.startswith(
        "log: stream shop has 2 of 3 replicas in sync; start another log server"
    )


def test_a_replica_at_an_address_that_is_not_configured_is_red():
    streams = [stream(place(1), place(2), ReplicaPlace("id-3", "", False, 5, True))]
    configured = {"10.0.0.1:7401", "10.0.0.2:7401", "10.0.0.3:7401"}
    (replicas,) = of_streams(streams, 3, configured)
    assert replicas.unlike == ("id-3",)
    streams = [stream(place(1), place(2))]
    for addresses in (configured, {"10.0.0.1:7401", "10.0.0.2:7401"}, None):
        assert observed(*of_streams(streams, 2, addresses)).problems == []
    (replicas,) = of_streams(streams, 2, {"10.0.0.1:7401", "10.0.0.3:7401"})
    (problem,) = replicas.problems()
    assert problem.startswith(
        "log: stream shop has a replica at grpc://10.0.0.2:7401, which no [[log_server]] names; correct"
    )
    is_red(observed(replicas), problem)


def test_what_is_degraded_is_ready_and_counted():
    replicas = of_streams([stream(place(1), place(2, in_sync=False))], 2)
    seen = observed(*replicas)
    assert seen.problems == []
    with served_at(seen) as port:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=10) as answer:
            assert answer.status == 200
            assert json.load(answer) == {"ready": True, "reasons": [], "degraded": seen.degraded}
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    assert "\ntuskline_ready 1.0\n" in text
    assert "\ntuskline_degraded 1.0\n" in text
    assert '\ntuskline_log_replicas_missing{source="shop"} 1.0\n' in text
    by = 'tuskline_log_replica_in_sync{log_server="grpc://10.0.0.2:7401",source="shop"}'
    assert f"\n{by} 0.0\n" in text


def test_a_membership_unlike_the_configured_one_is_a_problem_and_a_metric():
    unlike = "the quorum has 1 safekeeper, but 3 are configured"
    told = statuses.session(membership=statuses.membership(unlike=unlike))
    seen = QuorumView(told, True, ())
    (problem,) = [each for each in seen.problems if unlike in each]
    assert "; correct [safekeepers] addresses" in problem
    quorum = {"tuskline_quorum_membership_as_configured": 0.0}
    is_red(replace(observed(), quorum=seen), problem)
    families = quorum_metrics.families(seen)
    found = {sample.name: sample.value for each in families for sample in each.samples}
    assert found.items() >= quorum.items()
