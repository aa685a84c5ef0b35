"""What is wrong with a cluster of etcd, by what its members report."""

import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from walsender_bridge.change_log.repository.etcd import EtcdSettings
from walsender_bridge.change_log.repository.etcd_cluster import EtcdCluster, EtcdMember, ask
from walsender_bridge.errors import Cause, UnavailableError
from walsender_bridge.observability.etcd_view import EtcdView, faults

MEMBERS = tuple(
    EtcdMember(f"db-{number}:2379", None, "c", "3.4.23", 10, 100, frozenset(), 3)
    for number in (1, 2, 3)
)
AWAY = UnavailableError("etcd does not answer: timed out")


def test_a_cluster_that_is_well_has_no_faults() -> None:
    cluster = EtcdCluster(MEMBERS, None)
    assert [*faults(cluster)] == []
    assert (
        EtcdView(cluster, ()).summary
        == "3 of 3 members answer, version 3.4.23, 10% of the quota used"
    )


@pytest.mark.parametrize(
    ("changes", "what", "cause", "fatal"),
    [
        ({"error": AWAY}, "the member does not answer: timed out", Cause.UNAVAILABLE, False),
        ({"version": "3.3.25"}, "its version is 3.3.25", Cause.NOT_SUPPORTED, True),
        ({"version": ""}, "its version is unknown", Cause.NOT_SUPPORTED, True),
        ({"size": 85}, "85% of its quota is used", Cause.DISK_FULL, False),
        ({"cluster": "d"}, "endpoints names members of different clusters", Cause.CONFIG, True),
        ({"members": 5}, "endpoints names 3 of 5 members", Cause.CONFIG, False),
        ({"alarms": frozenset({"CORRUPT"})}, "(alarm CORRUPT)", Cause.CORRUPT, True),
        (
            {"alarms": frozenset({"NOSPACE"}), "size": 100},
            "its space is exhausted (alarm NOSPACE)",
            Cause.DISK_FULL,
            True,
        ),
    ],
)
def test_each_fault_of_a_member_is_named(changes, what, cause, fatal) -> None:
    changed = replace(MEMBERS[0], **changes)
    (found,) = faults(EtcdCluster((changed, *MEMBERS[1:]), None))
    assert what in found.error.what
    assert (found.error.cause, found.fatal) == (cause, fatal)
    assert found.error.repair or "error" in changes


def test_a_lost_majority_is_named_before_its_members() -> None:
    away = tuple(replace(each, error=AWAY) for each in MEMBERS[:2])
    first, *others = faults(EtcdCluster((*away, MEMBERS[2]), AWAY))
    assert first.fatal
    assert "no majority of its members answers (1 of 3 members answer)" in first.error.what
    assert [each.fatal for each in others] == [False, False]


def test_another_service_at_an_endpoint_is_named(free_port: int) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"header": 1}')

        def log_message(self, *_: object) -> None:
            pass

    endpoint = f"127.0.0.1:{free_port}"
    with ThreadingHTTPServer(("127.0.0.1", free_port), Other) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            (member,) = ask(EtcdSettings((endpoint,))).members
        finally:
            server.shutdown()
            serving.join()
    assert member.error is not None
    assert (member.error.what, member.error.where) == ("its answer is not that of etcd", endpoint)
