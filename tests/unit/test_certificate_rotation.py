"""Certificates are replaced while servers and clients run: nothing is restarted, and no call fails."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from cryptography import x509

from tests.support.log_entries import SCHEMAS, append_to
from tests.support.tls import HOSTS, SERVER, Authority, TlsLog, replace_files
from tests.support.waiting import wait_for
from walsender_bridge.change_log import listener
from walsender_bridge.errors import ConfigError, PrivilegeError, TusklineError, UnavailableError
from walsender_bridge.runtime.tls_files import TlsFiles


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TlsLog]:
    monkeypatch.setattr(listener, "POLL", 0.05)
    found = TlsLog(tmp_path, Authority(tmp_path))
    yield found
    found.stop()


def serial(address: str, tls: TlsFiles) -> int:
    """The serial number of the certificate that a service shows now; 0 if it shows none."""
    host, _, port = address.partition("://")[2].rpartition(":")
    context = ssl.create_default_context(cafile=str(tls.ca))
    context.load_cert_chain(tls.certificate, tls.key)
    try:
        # Wrapped before it connects: `ssl` leaves a socket open that the server has closed by then.
        with context.wrap_socket(socket.socket(), server_hostname=host) as connection:
            connection.settimeout(5)
            connection.connect((host, int(port)))
            shown = connection.getpeercert(binary_form=True)
    except OSError:
        return 0
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number


def serial_in(tls: TlsFiles) -> int:
    return x509.load_pem_x509_certificate(tls.certificate.read_bytes()).serial_number


def shown(log: TlsLog, tls: TlsFiles) -> set[int]:
    return {serial(each.address, tls) for each in (log.log_server, log.repository)}


def test_42_servers_show_their_new_certificate_and_no_call_fails(log: TlsLog) -> None:
    reader = log.authority.issue("reader")
    failed: list[TusklineError] = []
    slowest = [0.0]
    done = threading.Event()

    def ask() -> None:
        with log.log() as client, log.replica() as replica:
            while not done.is_set():
                began = time.monotonic()
                try:
                    client.status()
                    replica.stream_status("shop")
                except TusklineError as error:
                    failed.append(error)
                slowest[0] = max(slowest[0], time.monotonic() - began)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(2):
            replace_files(log.files, log.authority.issue(*SERVER, hosts=HOSTS))
            wait_for(
                lambda: shown(log, reader) == {serial_in(log.files)}, 10, "the new certificate"
            )
            log.append("shop")
    finally:
        done.set()
        asking.join()
    assert failed == []
    assert slowest[0] < 4.0
    assert len(log.read("shop")) == 3


def test_42_an_append_in_progress_goes_on(log: TlsLog) -> None:
    reader = log.authority.issue("reader")
    maker = log.makers["shop"]
    with (
        log.log() as client,
        client.open_writer("shop") as writer,
    ):
        new = log.authority.issue(*SERVER, hosts=HOSTS)
        replace_files(log.files, new)
        wait_for(lambda: shown(log, reader) == {serial_in(new)}, 10, "new certificate")
        writer.send([maker.whole()], schemas=list(SCHEMAS.values()))
        assert writer.next_ack(10) is not None
        client.barrier({"shop": maker.end_lsn}, 10)
    assert len(log.read("shop")) == 2


def test_42_a_client_connects_with_its_new_certificate(log: TlsLog) -> None:
    own = log.authority.issue("reader")
    with log.replica(own) as replica:
        replica.stream_status("shop")
        with pytest.raises(PrivilegeError):
            replica.list_transactions_after("shop", 1, 0)
        replace_files(own, log.authority.issue("writer"))
        assert replica.list_transactions_after("shop", 1, 0)
        # One that cannot be used changes nothing for a client that has one.
        own.certificate.write_text("-----BEGIN CERTIFICATE-----\n")
        assert replica.list_transactions_after("shop", 1, 0)


def test_42_a_client_that_is_made_halfway_through_a_replacement_goes_on(log: TlsLog) -> None:
    """As those are that a running part makes for each observation, or to open an append again."""
    own, new = log.authority.issue("operator"), log.authority.issue("operator")
    log.append("shop", own)
    own.certificate.write_bytes(new.certificate.read_bytes())
    log.append("shop", own)
    own.key.write_bytes(new.key.read_bytes())
    log.append("shop", own)
    # Who has never used them has nothing to go on with.
    other = log.authority.issue("operator")
    other.certificate.write_bytes(new.certificate.read_bytes())
    with pytest.raises(ConfigError, match="do not fit"):
        log.log(other)


@pytest.mark.parametrize("damage", ["half written", "expired", "gone"])
def test_42_a_new_certificate_that_cannot_be_used_is_refused(log: TlsLog, damage: str) -> None:
    reader = log.authority.issue("reader")
    before = serial_in(log.files)
    with structlog.testing.capture_logs() as lines:
        match damage:
            case "half written":
                log.files.certificate.write_bytes(log.files.certificate.read_bytes()[:200])
            case "expired":
                replace_files(log.files, log.authority.expired(*SERVER, hosts=HOSTS))
            case _:
                log.files.key.unlink()
        refused = "new certificate refused; the earlier one remains in use"
        wait_for(
            lambda: sum(each["event"] == refused for each in lines) >= 2, 10, "refused by both"
        )
        time.sleep(0.3)
    found = [each for each in lines if each["event"] == refused]
    # Once by each.
    assert {each["address"] for each in found} == {log.log_server.address, log.repository.address}
    assert len(found) == 2
    assert all(str(log.files.key.parent) in each["file"] for each in found)
    assert shown(log, reader) == {before}
    log.append("shop")

    # The right files end it.
    new = log.authority.issue(*SERVER, hosts=HOSTS)
    replace_files(log.files, new)
    wait_for(lambda: shown(log, reader) == {serial_in(new)}, 10, "new certificate")
    log.append("shop")


def test_42_a_certificate_that_ends_is_warned_of_once(log: TlsLog) -> None:
    end = log.files.load(server=True).ends
    assert end == pytest.approx(time.time() + 365 * 86_400, abs=86_400)
    with structlog.testing.capture_logs() as lines:
        for moment in (end - 15 * 86_400, end - 13 * 86_400, end - 12 * 86_400, end + 1, end + 2):
            log.log_server._listener._warn_of_end(moment)
    assert [each["event"] for each in lines if each.get("address") == log.log_server.address] == [
        *("the certificate expires soon", "the certificate has expired")
    ]


def test_42_a_new_authority_ends_the_certificates_of_the_former_one(
    log: TlsLog, tmp_path: Path
) -> None:
    former = log.authority.issue("operator")
    with log.log(former) as client:
        client.status()
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    reader = other.issue("reader")
    replace_files(log.operator, other.issue("operator"))
    replace_files(log.files, other.issue(*SERVER, hosts=HOSTS))
    wait_for(lambda: shown(log, reader) == {serial_in(log.files)}, 10, "new certificate")
    log.append("shop")
    before = log.status()
    for call in (log.log(former).status, lambda: append_to(log.replica(former), "shop", 1 << 30)):
        with pytest.raises(UnavailableError):
            call()
    assert log.status() == before


def test_42_an_append_ends_with_the_authority_of_its_certificate(
    log: TlsLog, tmp_path: Path
) -> None:
    """Nothing else ends a writer with a stolen certificate: it would write for as long as its connection lasts."""
    maker = log.makers["shop"]
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other")
    both = other.issue(*SERVER, hosts=HOSTS)
    alone = both.ca.read_bytes()
    both.ca.write_bytes(alone + log.files.ca.read_bytes())
    reader = other.issue("reader")
    with log.log(log.authority.issue("writer")) as client, client.open_writer("shop") as writer:
        replace_files(log.files, both)
        wait_for(lambda: shown(log, reader) == {serial_in(both)}, 10, "new certificate")
        writer.send([maker.whole()], schemas=list(SCHEMAS.values()))
        assert writer.next_ack(10) is not None
        log.files.ca.write_bytes(alone)
        with pytest.raises(UnavailableError):
            wait_for(lambda: writer.next_ack(0.1), 20, "an error")
    replace_files(log.operator, other.issue("operator"))
    log.append("shop")
