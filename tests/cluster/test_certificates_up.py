"""Certificates of a running installation are replaced, and then their authority, at every port at once; nothing is restarted."""

import contextlib
import http.client
import itertools
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from cryptography import x509

from tests.cluster.test_port_scan import (
    STARTUP,
    Installation,
    in_tls,
    reading_from,
    running,
)
from tests.cluster.test_strangers import PREFACE, SETTINGS
from tests.support.listeners import ListeningSocket, listeners
from tests.support.repeated import Repeated
from tests.support.servers import MakeServer
from tests.support.tls import SERVER, Authority, replace_files
from tests.support.tls_safekeeper import GREETING
from tests.support.waiting import wait_for
from walsender_bridge.config import load_config
from walsender_bridge.quorum.protocol.frames import encode
from walsender_bridge.runtime.tls_context import client_context
from walsender_bridge.runtime.tls_files import TlsFiles

ROLES = (*SERVER, "writer", "lake", "operator", "proposer", "safekeeper")


@pytest.fixture
def installation(tmp_path: Path, make_server: MakeServer) -> Iterator[Installation]:
    with running(tmp_path, make_server) as found:
        yield found


class Ports:
    """The installation's ports: what each is asked in its own protocol, and what it says."""

    def __init__(self, installation: Installation) -> None:
        assert installation.tuskline.process is not None
        self.all = listeners(installation.tuskline.process.pid)
        metrics = load_config(installation.tuskline.config).metrics
        assert metrics is not None
        self.metrics = metrics.listen
        self._asked = {
            installation.safekeeper: encode(GREETING),
            installation.wal_server: STARTUP,
            metrics.listen: b"GET /healthz HTTP/1.0\r\n\r\n",
        }

    def says(self, port: ListeningSocket, tls: TlsFiles) -> bytes:
        """The beginning of its answer to the holder of a certificate; nothing: the certificate is refused."""
        with contextlib.suppress(OSError):
            found = in_tls(port, tls)
            if found is not None:
                with found:
                    found.settimeout(10)
                    found.sendall(self._asked.get(f"{port.host}:{port.port}", PREFACE + SETTINGS))
                    return found.recv(64)
        return b""

    def serials(self, tls: TlsFiles) -> set[int]:
        """The serial numbers of the certificates that they show; 0 where there is none."""
        return {_serial(port, tls) for port in self.all}


def _serial(port: ListeningSocket, tls: TlsFiles) -> int:
    with contextlib.suppress(OSError):
        found = in_tls(port, tls)
        if found is not None:
            with found:
                shown = found.getpeercert(binary_form=True)
            return 0 if shown is None else _number(x509.load_der_x509_certificate(shown))
    return 0


def _number(certificate: x509.Certificate) -> int:
    return certificate.serial_number


def serial_in(tls: TlsFiles) -> int:
    return _number(x509.load_pem_x509_certificate(tls.certificate.read_bytes()))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_42_all_certificates_of_a_running_installation_are_replaced(
    installation: Installation, tmp_path: Path
) -> None:
    if installation.host == "127.0.0.1":
        pytest.skip(
            "metrics have TLS on an address that is not loopback, and this machine has none"
        )
    installation.write()
    ports = Ports(installation)
    (tmp_path / "next").mkdir()
    former, after = installation.authority, Authority(tmp_path / "next")
    old, new = former.issue("operator"), after.issue("operator")
    monitor = former.issue("monitor")
    host, _, metrics_port = ports.metrics.rpartition(":")

    def scrape() -> None:
        context = client_context(monitor).current()
        connection = http.client.HTTPSConnection(
            host, int(metrics_port), timeout=20, context=context
        )
        with contextlib.closing(connection):
            connection.request("GET", "/healthz")
            assert connection.getresponse().status == 200

    numbers = itertools.count(1_000_000)

    def commit() -> None:
        with installation.shop.connect() as connection:
            connection.execute("INSERT INTO orders VALUES (%s, 'x')", [next(numbers)])

    def everywhere(tls: TlsFiles, *, served: bool) -> bool:
        return all(bool(ports.says(port, tls)) == served for port in ports.all)

    def go_on() -> None:
        """Everybody has done something since."""
        before = reading.calls, scraping.calls, committing.calls
        wait_for(
            lambda: all(
                now > then
                for now, then in zip(
                    (reading.calls, scraping.calls, committing.calls), before, strict=True
                )
            ),
            60,
            "the others go on",
        )
        installation.write()

    everybody = {
        installation.own: lambda: after.issue(*ROLES, hosts=(installation.host,)),
        installation.reader: lambda: after.issue("reader", streams=("shop",)),
        monitor: lambda: after.issue("monitor"),
    }
    both = old.ca.read_bytes() + new.ca.read_bytes()
    with (
        reading_from(installation) as reading,
        Repeated(scrape, OSError, http.client.HTTPException, AssertionError) as scraping,
        Repeated(commit, psycopg.Error) as committing,
    ):
        # In the order of the manual: both authorities everywhere, then the certificates, then the new authority alone.
        assert everywhere(old, served=True)
        for files in everybody:
            files.ca.write_bytes(both)
        wait_for(lambda: everywhere(new, served=True), 60, "both authorities count")
        go_on()
        for files, issue in everybody.items():
            issued = issue()
            issued.ca.write_bytes(both)
            replace_files(files, issued)
        wait_for(
            lambda: ports.serials(new) == {serial_in(installation.own)}, 60, "the new certificate"
        )
        assert everywhere(old, served=True)
        go_on()
        for files in everybody:
            files.ca.write_bytes(new.ca.read_bytes())
        wait_for(lambda: everywhere(old, served=False), 60, "the former authority counts no more")
        assert everywhere(new, served=True)
        go_on()
    assert (reading.errors, scraping.errors, committing.errors) == ([], [], [])
    assert installation.tuskline.process is not None
    # The same processes, at the same ports.
    assert listeners(installation.tuskline.process.pid) == ports.all
    installation.check_rows()
    assert installation.tuskline.json("log", "verify")["violations"] == []
