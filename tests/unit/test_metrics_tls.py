"""Metrics and readiness for other machines: certificates of the role `monitor`, and a crowd that shakes no hands."""

import contextlib
import json
import socket
import ssl
import time
from collections.abc import Iterator
from http.client import HTTPSConnection
from typing import Any, cast

import pytest

from tests.support.http_service import served
from tests.support.tls import HOSTS, Authority, replace_files
from walsender_bridge.config import Config, MetricsSection
from walsender_bridge.doctor import parts
from walsender_bridge.doctor.finding import Severity
from walsender_bridge.errors import ConfigError
from walsender_bridge.observability import certificate_view, metrics
from walsender_bridge.observability.bounded_http import CONNECTIONS
from walsender_bridge.observability.certificate_view import CertificateView
from walsender_bridge.observability.observation import Observation
from walsender_bridge.runtime import certificates
from walsender_bridge.runtime.tls_context import TlsContext
from walsender_bridge.runtime.tls_files import TlsFiles

DAY = 86_400.0


def observation(certificate: CertificateView | None = None) -> Observation:
    return Observation(time.time(), None, [], [], None, None, certificate=certificate)


class Observations:
    def latest(self) -> Observation:
        return observation()


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path)


@contextlib.contextmanager
def serving(files: TlsFiles) -> Iterator[metrics.Endpoint]:
    observations = cast("metrics.SharedObservations", Observations())
    context = TlsContext(files, server=True)
    with metrics.Endpoint(("127.0.0.1", 0), observations, context) as server, served(server):
        yield server


def get(server: metrics.Endpoint, files: TlsFiles, path: str = "/readyz") -> tuple[int, Any]:
    context, _ = files.context()
    connection = HTTPSConnection("127.0.0.1", server.server_port, timeout=20, context=context)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_37_metrics_are_read_with_a_monitors_certificate_alone(authority, tmp_path):
    (tmp_path / "other").mkdir()
    with serving(authority.issue("log-server", hosts=HOSTS)) as server:
        for role in ("monitor", "operator"):
            assert get(server, authority.issue(role))[0] == 503
            code, body = get(server, authority.issue(role), "/metrics")
            assert code == 200
            assert b"tuskline_ready 0.0" in body
        for role in ("reader", "writer", "proposer"):
            for path in ("/readyz", "/metrics", "/healthz"):
                code, body = get(server, authority.issue(role), path)
                assert code == 403
                assert "lacks the role monitor" in json.loads(body)["error"]
        code, body = get(server, authority.issue_uri("https://example.org/"))
        assert code == 403
        context, _ = Authority(tmp_path / "other").issue("monitor").context()
        context.load_verify_locations(authority.folder / "authority" / "ca.pem")
        with (
            socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as stranger,
            pytest.raises(OSError, match=r"(?i)unknown.ca"),
        ):
            stranger.recv(1)
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as plain:
            plain.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert b"HTTP" not in plain.recv(4096)


def test_37_a_crowd_that_shakes_no_hands_keeps_no_monitor_out(authority):
    monitor = authority.issue("monitor")
    with (
        serving(authority.issue("log-server", hosts=HOSTS)) as server,
        contextlib.ExitStack() as crowd,
    ):
        for _ in range(2 * CONNECTIONS):
            silent = socket.create_connection(("127.0.0.1", server.server_port), timeout=20)
            crowd.enter_context(silent)
        assert get(server, monitor)[0] == 503


def test_38_the_endpoints_certificate_is_replaced_while_it_runs(authority, tmp_path):
    (tmp_path / "next").mkdir()
    after = Authority(tmp_path / "next")
    files, old, new = (
        authority.issue("log-server", hosts=HOSTS),
        authority.issue("monitor"),
        after.issue("monitor"),
    )
    with serving(files) as server:
        assert get(server, old)[0] == 503
        replace_files(files, after.issue("log-server", hosts=HOSTS))
        assert get(server, new)[0] == 503
        with pytest.raises(ssl.SSLError):
            get(server, old)


def test_36_metrics_do_not_listen_for_other_machines_without_certificates(tmp_path):
    class Settings:
        metrics = MetricsSection(listen="192.0.2.1:9400")
        tls_files = None

    with pytest.raises(ConfigError, match="other machines could reach") as caught:
        metrics.serve(cast("Config", Settings()))
    assert "tuskline certs" in caught.value.repair


# -- the end of a certificate -----------------------------------------------------------------------


def _settings(files: TlsFiles | None) -> Config:
    class Settings:
        tls_files = files
        parts = frozenset[str]()
        quorum_source = None

    return cast("Config", Settings())


def _of_days(authority: Authority, tmp_path, days: int) -> TlsFiles:
    out = tmp_path / f"of-{days}-days"
    certificates.issue(
        authority.folder / "authority", out, name="it", uri="tuskline:monitor", days=days
    )
    return TlsFiles(out / "ca.pem", out / "cert.pem", out / "key.pem")


@pytest.mark.parametrize(("left", "said"), [(14.1, ""), (13.9, "expires on"), (-0.1, "expired on")])
def test_an_end_within_two_weeks_is_a_problem_and_a_finding(authority, tmp_path, left, said):
    its = certificate_view.observe(_settings(_of_days(authority, tmp_path, 60)))
    assert its is not None
    now = its.ends - left * DAY
    assert said in its.problem(now)
    assert bool(its.problem(now)) == bool(said)
    assert its.is_over(now) == (left < 0)


def test_doctor_status_and_metrics_name_it(authority, tmp_path, monkeypatch):
    settings = _settings(_of_days(authority, tmp_path, 60))
    (fine,) = parts.of_certificate(settings)
    assert fine.severity is Severity.OK
    its = certificate_view.observe(settings)
    assert its is not None
    for left, severity in ((3 * DAY, Severity.WARNING), (-DAY, Severity.ERROR)):
        moment = its.ends - left
        monkeypatch.setattr(time, "time", lambda at=moment: at)
        (found,) = parts.of_certificate(settings)
        assert found.severity is severity
        assert "tuskline certs issue" in found.repair
        seen = observation(its)
        named = [
            any("cert.pem expire" in each for each in what)
            for what in (seen.degraded, seen.problems)
        ]
        assert named == [left > 0, left < 0]
        (sample,) = metrics._certificate(seen).samples
        assert sample.name == "tuskline_certificate_expires_in_seconds"
        assert sample.value == pytest.approx(left)


def test_the_days_of_a_certificate_that_is_over_are_known_and_unfit_files_are_a_problem(
    authority, tmp_path
):
    expired = authority.expired("monitor")
    its = certificate_view.observe(_settings(expired))
    assert its is not None
    assert its.error is None
    assert its.ends < time.time()
    expired.key.write_bytes(authority.issue("monitor").key.read_bytes())
    its = certificate_view.observe(_settings(expired))
    assert its is not None
    assert "do not fit" in its.problem(time.time())
    assert certificate_view.observe(_settings(None)) is None
