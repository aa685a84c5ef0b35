"""What `doctor` finds in the parts: ports that others have, processes that end, tables of the lake that do not follow."""

import os
import socket
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from cryptography import x509

from spark_consumers.lake.maintenance.state import Summary, write_summary
from spark_consumers.lake.manifest.chain import (
    Manifest,
    StreamPosition,
    TableVersion,
    open_chain,
)
from tests.support.parts_config import configuration
from tests.support.tls import Authority
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.repository.candidate import RepositoryCandidate
from walsender_bridge.change_log.repository.etcd import EtcdSettings
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.config import Config, load_config
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.doctor import machine
from walsender_bridge.doctor import parts as doctor_parts
from walsender_bridge.doctor.finding import Severity
from walsender_bridge.errors import Cause, ConfigError, LakeError
from walsender_bridge.observability import certificate_view, lake_status
from walsender_bridge.runtime import certificate_holder, certificates, json_model, pid_file
from walsender_bridge.runtime.supervisor import ChildState, SupervisorStates
from walsender_bridge.runtime.tls_files import TlsFiles


@pytest.fixture
def settings(tmp_path: Path) -> Config:
    return load_config(configuration(tmp_path, lake=True, metrics=True))


def test_a_port_that_another_program_has_is_named(settings: Config) -> None:
    assert list(doctor_parts.of_ports(settings)) == []
    assert settings.metrics is not None
    for address in (settings.log.listen, settings.log_server[0].listen, settings.metrics.listen):
        with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
            (found,) = doctor_parts.of_ports(settings)
            assert (found.where, found.cause) == (address, Cause.CONFIG)
            assert found.what == "cannot listen: Address already in use"
            assert found.repair
            # It is ours then.
            with pid_file.held(settings.run_dir):
                assert list(doctor_parts.of_ports(settings)) == []


def test_a_repository_of_another_configuration_is_named(settings: Config) -> None:
    cluster = EtcdSettings((f"127.0.0.1:{free_port()}",), lease=2.0)

    def serve(_: object) -> RepositoryServer:
        raise AssertionError("it must not lead")

    follower = RepositoryCandidate(cluster, settings.log.listen, serve)
    follower.start()
    try:
        (found,) = doctor_parts.of_ports(settings)
        assert found.what == "the bridge of another configuration listens there"
        assert found.severity is Severity.ERROR
        with pid_file.held(settings.run_dir, "bridge"):
            assert list(doctor_parts.of_ports(settings)) == []
    finally:
        follower.stop()


def test_a_log_server_of_another_configuration_is_named(settings: Config, tmp_path: Path) -> None:
    (place,) = settings.hosted_log_servers
    other = ReplicaServer(tmp_path / "other", place.listen)
    try:
        (found,) = doctor_parts.of_ports(settings)
        assert (found.where, found.cause) == (place.listen, Cause.CONFIG)
        assert found.what == "the log-server of another configuration listens there"
    finally:
        other.stop()


def test_a_folder_that_another_configuration_uses_is_named(settings: Config) -> None:
    folder = settings.hosted_log_servers[0].data_dir
    folder.mkdir()
    with pid_file.held(folder, "log-server"):
        (found,) = doctor_parts.of_ports(settings)
        assert (found.where, found.cause) == (str(folder), Cause.RUNNING)
        assert f"as process {os.getpid()}" in found.what
        settings.run_dir.mkdir(parents=True, exist_ok=True)
        with pid_file.held(settings.run_dir, "log-server"):
            assert list(doctor_parts.of_ports(settings)) == []


def test_other_metrics_are_a_warning_as_up_starts_all_the_same(settings: Config) -> None:
    assert settings.metrics is not None
    port = int(settings.metrics.listen.rpartition(":")[2])

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", port), Health) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        (found,) = doctor_parts.of_ports(settings)
        server.shutdown()
    assert (found.where, found.severity) == (settings.metrics.listen, Severity.WARNING)


def _log_server_with(tls: TlsFiles, tmp_path: Path, listen: str) -> Config:
    config = tmp_path / "tuskline.toml"
    config.write_text(
        f"""
[machine]
parts = ["log-server"]
data_dir = "machine"
[tls]
ca = "{tls.ca}"
certificate = "{tls.certificate}"
key = "{tls.key}"
[[log_server]]
data_dir = "log-server"
listen = "{listen}:{free_port()}"
"""
    )
    return load_config(config)


@pytest.mark.parametrize(
    ("listen", "hosts", "words"),
    [
        ("127.0.0.1", ("127.0.0.1",), ""),
        ("localhost", ("localhost",), ""),
        (
            "127.0.0.1",
            ("localhost",),
            "it does not name 127.0.0.1, the host of [[log_server]] listen",
        ),
        ("localhost", ("127.0.0.1",), "it does not name localhost"),
        ("localhost", (), "it does not name localhost"),
        ("[0::0]", ("::1",), "is no address under which another machine reaches this one"),
    ],
)
def test_an_address_that_no_client_accepts_is_named(
    tmp_path: Path, listen: str, hosts: tuple[str, ...], words: str
) -> None:
    tls = Authority(tmp_path).issue("log-server", hosts=hosts)
    its = _log_server_with(tls, tmp_path, listen)
    found = list(doctor_parts.of_hosts(its))
    assert [each.severity for each in found] == [Severity.ERROR] * bool(words)
    assert all(words in each.what and each.repair for each in found)


def test_a_certificate_without_a_services_name_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another authority than `tuskline certs` has the hosts, and may lack what is derived from them."""
    with monkeypatch.context() as patch:
        patch.setattr(certificate_holder, "service_names", lambda *_: [])
        tls = Authority(tmp_path).issue("log-server", "repository", hosts=("127.0.0.1",))
    its = _log_server_with(tls, tmp_path, "127.0.0.1")
    (found,) = doctor_parts.of_hosts(its)
    assert found.severity is Severity.ERROR
    holder = certificate_holder.identity("log-server-repository", ["log-server", "repository"])
    assert holder.service_name("127.0.0.1") in found.what
    refused = certificate_view.unfit(its, tls)
    assert refused is not None
    assert "lacks the DNS name" in refused.what
    with pytest.raises(ConfigError, match="lacks the DNS name"):
        ReplicaServer(tmp_path / "one", "127.0.0.1:0", tls=tls)


def test_the_hosts_of_listen_decide_which_services_name_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the certificate: one may be a wildcard, and not every one has to be a service's."""
    holder = certificate_holder.identity("log-server", ["log-server"])
    of_first = [holder.service_name("db-1.corp.example")]
    monkeypatch.setattr(certificate_holder, "service_names", lambda *_: of_first)
    monkeypatch.setattr(certificates, "_host", x509.DNSName)
    authority = Authority(tmp_path)
    for hosts in (("*.corp.example",), ("db-1.corp.example", "db-2.corp.example")):
        tls = authority.issue("log-server", hosts=hosts)
        for listen, accepted in (("db-1.corp.example", True), ("db-2.corp.example", False)):
            its = _log_server_with(tls, tmp_path, listen)
            refused = certificate_view.unfit(its, tls)
            assert (refused is None) == accepted
            assert (list(doctor_parts.of_hosts(its)) == []) == accepted
            assert refused is None or holder.service_name(listen) in refused.what
        # Clients may reach the service by another name than that of `listen`.
        assert certificate_view.unfit(_log_server_with(tls, tmp_path, "10.0.0.1"), tls) is None
    why = certificate_holder.lacks_service_name(holder, [("DNS", "*.corp.example")], [])
    assert f"{holder.digest()}.tuskline.HOST" in why


def test_a_log_service_does_not_start_without_its_name_at_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = certificate_holder.identity("log-server", ["log-server"])
    of_first = [holder.service_name("localhost")]
    monkeypatch.setattr(certificate_holder, "service_names", lambda *_: of_first)
    tls = Authority(tmp_path).issue("log-server", hosts=("localhost", "127.0.0.1"))
    with pytest.raises(ConfigError, match="lacks the DNS name") as caught:
        ReplicaServer(tmp_path / "one", "127.0.0.1:0", tls=tls)
    assert "--host 127.0.0.1" in caught.value.repair
    ReplicaServer(tmp_path / "one", "localhost:0", tls=tls).stop()


def test_a_process_that_ends_again_and_again_is_named_while_up_runs(settings: Config) -> None:
    settings.run_dir.mkdir(parents=True)
    states = SupervisorStates(1, {"lake": ChildState(None, "restarting", 9, int(Cause.LAKE))})
    (settings.run_dir / "up.json").write_bytes(json_model.encode(states))
    assert list(doctor_parts.of_processes(settings)) == []
    with pid_file.held(settings.run_dir):
        (found,) = doctor_parts.of_processes(settings)
    assert found.what == "process lake is restarting (exit code 17, lake)"
    assert not found.prevents


def test_a_table_that_does_not_follow_is_named_with_the_way_out(settings: Config) -> None:
    assert settings.lake is not None
    assert list(doctor_parts.of_lake(settings, None)) == []
    chain = open_chain(settings.lake.uri)
    chain.initialise("log", "iceberg")
    table = TableVersion(*("p", "iceberg", 1, "", ("id",), (), 5, 1, 10, 7, "paused"), as_of=7)
    head = Manifest(
        *("lake", 9, 1, 0, 2, 0.0),
        streams={"shop": StreamPosition(1, 100, 7, 30)},
        tables={"shop.public.a": table, "shop.public.b": replace(table, path="q", state="live")},
        not_copied={"shop.public.c": "shop.public.c: permission denied\nHINT:  GRANT SELECT"},
    )
    chain.publish(head, None)
    *found, unmaintained = doctor_parts.of_lake(settings, "log")
    assert unmaintained.what == "no maintainer has looked at the lake yet"
    assert unmaintained.severity is Severity.WARNING
    write_summary(chain, Summary(at=time.time()))
    assert list(doctor_parts.of_lake(settings, "log")) == found
    assert [(each.where, each.what, each.repair) for each in found] == [
        ("shop.public.a", "is paused, as of epoch 7", "tuskline table resume shop.public.a"),
        (
            "shop.public.c",
            "was not copied: permission denied",
            "GRANT SELECT; it is retried",
        ),
    ]
    (other,) = [each for each in doctor_parts.of_lake(settings, "other") if each.check == "lake"]
    assert "this lake belongs to log" in other.what
    # Also what its job said, once.
    lake_status.write(settings.run_dir, LakeError(other.what, where=other.where))
    told = [each for each in doctor_parts.of_lake(settings, "other") if each.check == "lake"]
    assert len(told) == 1


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "log-server").write_text("a file")
    for folder in (tmp_path / "log-server", tmp_path / "log-server" / "below"):
        (found,) = machine.examine({"[[log_server]] data_dir": folder})
        assert (found.cause, found.what) == (Cause.CONFIG, f"{tmp_path}/log-server is not a folder")
