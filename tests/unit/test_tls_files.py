"""The files of a certificate: what fits together is used, what does not is named; paths travel with an address."""

import shutil
from pathlib import Path

import pytest

from tests.support.tls import HOSTS, Authority
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.repository.service import RepositoryServer
from walsender_bridge.errors import ConfigError
from walsender_bridge.runtime.tls_files import TlsFiles, split, with_files

FILES = TlsFiles(Path("/etc/a b/ca.pem"), Path("/x&key=y/cert.pem"), Path("/é?#/key.pem"))


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def test_files_that_fit_are_loaded(authority: Authority) -> None:
    client, server = authority.issue("reader"), authority.issue("log-server", hosts=HOSTS)
    assert client.load().key == client.key.read_bytes()
    assert server.load(server=True).certificate == server.certificate.read_bytes()
    assert "PRIVATE" not in repr(server.load())


def test_what_does_not_fit_is_refused_by_reason(authority: Authority, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Authority(tmp_path / "other").issue("reader")
    own = authority.issue("reader")
    for files, server, reason in (
        (own, True, "unsuitable certificate purpose"),
        (authority.expired("reader"), False, "certificate has expired"),
        (TlsFiles(other.ca, own.certificate, own.key), False, "unable to get local issuer"),
        (TlsFiles(own.ca, own.certificate, other.key), False, "KEY_VALUES_MISMATCH"),
        (TlsFiles(own.ca, own.key, own.key), False, "fit: "),
        (TlsFiles(own.ca, tmp_path / "none", own.key), False, "No such file"),
        (TlsFiles(tmp_path, own.certificate, own.key), False, "Is a directory"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            files.load(server=server)
        assert "PRIVATE" not in str(caught.value)
    own.certificate.write_bytes(own.certificate.read_bytes()[:300])
    with pytest.raises(ConfigError, match="do not fit"):
        own.load()


def test_a_key_that_others_can_read_is_refused(authority: Authority) -> None:
    own = authority.issue("reader")
    own.key.chmod(0o604)
    with pytest.raises(ConfigError, match=r"the key is accessible to other accounts \(mode 0604\)"):
        own.load()


def test_a_key_with_a_passphrase_does_not_ask_for_it(authority: Authority) -> None:
    from cryptography.hazmat.primitives import serialization as s

    own = authority.issue("reader")
    key = s.load_pem_private_key(own.key.read_bytes(), None)
    own.key.write_bytes(
        key.private_bytes(
            s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"secret")
        )
    )
    with pytest.raises(ConfigError, match="the key has a passphrase"):
        own.load()


def test_a_replaced_file_has_another_stamp(authority: Authority, tmp_path: Path) -> None:
    own = authority.issue("reader")
    before = own.stamp()
    assert own.stamp() == before
    shutil.copy2(own.key, tmp_path / "copy")
    (tmp_path / "copy").replace(own.key)
    assert own.stamp() != before
    own.ca.unlink()
    assert own.stamp()[0] == (0, 0, 0)


@pytest.mark.parametrize("address", ["db-1:7400", "grpc://db-1:7400", "grpc+tls://db-1:7400"])
def test_an_address_carries_the_paths(address: str) -> None:
    carried = with_files(address, FILES)
    assert split(carried) == ("grpc+tls://db-1:7400", FILES)
    assert split(with_files(carried, FILES)) == ("grpc+tls://db-1:7400", FILES)


def test_an_address_without_paths_stays_as_it_is() -> None:
    assert split("db-1:7400") == ("grpc://db-1:7400", None)
    assert with_files("[::1]:7400", None) == "grpc://[::1]:7400"
    assert with_files("grpc+tls://a:1", None) == "grpc+tls://a:1"


@pytest.mark.parametrize("query", ["", "ca=a", "ca=a&key=b", "ca=a&ca=b&key=c", "x=1&y=2&z=3"])
def test_an_address_with_too_few_paths_is_refused(query: str) -> None:
    with pytest.raises(ConfigError, match="invalid address") as caught:
        LogClient(f"grpc+tls://db-1:7400?{query}")
    assert "?ca=FILE&certificate=FILE&key=FILE" in caught.value.repair


def test_a_client_without_a_certificate_is_told_to_name_one() -> None:
    with pytest.raises(ConfigError, match="asks for a certificate") as caught:
        LogClient("grpc+tls://127.0.0.1:1")
    assert "[tls]" in caught.value.repair


@pytest.mark.parametrize("host", [".".join("0000"), "[::0]", "10.255.255.1"])
def test_a_service_that_others_could_reach_needs_tls(tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="other machines could reach this address") as caught:
        ReplicaServer(tmp_path / "log-server", f"{host}:0")
    assert "tuskline certs" in caught.value.repair
    log = RepositoryServer(tmp_path / "log", f"{host}:0", log_servers=["127.0.0.1:1"])
    with pytest.raises(ConfigError, match="other machines could reach this address"):
        log.start()
    # It has left its folder.
    ReplicaServer(tmp_path / "log-server", "localhost:0").stop()
