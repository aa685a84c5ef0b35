"""`tuskline certs`: an authority, and certificates of a role; keys that nobody else can read, and that are never overwritten."""

import json
import os
import ssl
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.support.tls import files_in
from walsender_bridge.cli import certs
from walsender_bridge.errors import Cause, ConfigError, UnavailableError, UsageError
from walsender_bridge.runtime import certificate_holder, certificates

URI = "tuskline:reader?name=spark&streams=*"


def _run(*arguments, umask=0o022):
    return subprocess.run(
        [sys.executable, "-m", "walsender_bridge.cli.app", "certs", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        umask=umask,
    )


@pytest.fixture
def authority(tmp_path):
    certificates.init_authority(tmp_path / "authority")
    return tmp_path / "authority"


def _certificate(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())


def _modes(folder: Path) -> dict[str, int]:
    return {each.name: stat.S_IMODE(each.stat().st_mode) for each in [folder, *folder.iterdir()]}


def test_init_and_issue_print_what_they_made_and_no_key(tmp_path):
    authority, out = tmp_path / "authority", tmp_path / "bridge"
    # A careless umask changes nothing.
    done = _run("init", authority, "--json", umask=0)
    assert done.returncode == 0, done.stderr
    arguments = ["issue", authority, "--role", "repository", "--role", "writer"]
    arguments += ["--name", "bridge", "--host", "db-1", "--host", "10.0.0.1", "--out", out]
    done = _run(*arguments, "--days", 30, "--json", umask=0)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["roles"] == ["repository", "writer"]
    assert shown["hosts"] == ["db-1", "10.0.0.1"]
    assert shown["streams"] == ["*"]
    assert shown["serial_number"] == f"{_certificate(out).serial_number:x}"
    assert _modes(authority) == {"authority": 0o700, "ca.pem": 0o600, "ca.key": 0o600}
    assert _modes(out) == {"bridge": 0o700, "ca.pem": 0o600, "cert.pem": 0o600, "key.pem": 0o600}
    assert "PRIVATE" not in done.stdout + done.stderr
    assert {each.name for each in tmp_path.iterdir()} == {"authority", "bridge"}


def test_the_roles_are_the_first_alternative_name(authority, tmp_path):
    certificates.issue(
        authority, tmp_path / "s", name="s", uri=URI, hosts=["a.b", "::1", "1.2.3.4"]
    )
    found = _certificate(tmp_path / "s").extensions
    names = [
        str(each.value) for each in found.get_extension_for_class(x509.SubjectAlternativeName).value
    ]
    assert names[:4] == [URI, "a.b", "::1", "1.2.3.4"]


def test_a_servers_certificate_has_a_name_for_each_host_that_says_who_it_is(authority, tmp_path):
    hosts = ("db-1", "127.0.0.1", "::1")
    uri = "tuskline:log-server?name=one&streams=shop"
    certificates.issue(authority, tmp_path / "out", name="one", uri=uri, hosts=hosts)
    its = _certificate(tmp_path / "out").extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    names = its.value.get_values_for_type(x509.DNSName)
    holder = certificate_holder.parse(uri.encode())
    assert names == ["db-1", *map(holder.service_name, hosts)]
    # An address is written in many ways, and is never taken for a name that looks like it.
    assert holder.service_name("[0:0::1]") == names[3]
    assert holder.service_name("DB-1.") == names[1]
    assert holder.service_name("127-0-0-1") != names[2]
    for other in (
        "tuskline:log-server?name=two&streams=shop",
        "tuskline:log-server+reader?name=one&streams=shop",
        "tuskline:log-server?name=one&streams=*",
        "tuskline:log-server?name=one&streams=shop,bank",
    ):
        assert certificate_holder.service_names(other, hosts) != names[1:]
    assert certificate_holder.service_names("https://example", hosts) == []


def test_the_names_for_an_authority_of_ones_own_are_those_that_issue_gives(authority, tmp_path):
    holder = ["--role", "log-server", "--name", "one", "--stream", "shop", "--host", "db-1"]
    assert _run("issue", authority, *holder, "--out", tmp_path / "out").returncode == 0
    its = _certificate(tmp_path / "out").extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    shown = json.loads(_run("names", *holder, "--json").stdout)
    assert [each.value for each in its.value] == [
        shown["uri"],
        *shown["hosts"],
        *shown["service_names"],
    ]
    done = _run("names", "--role", "log-server", "--name", "one")
    assert (done.returncode, done.stdout) == (Cause.USAGE, ""), "it serves, and has no host"


def test_no_certificate_is_issued_for_the_name_of_another_holders_service(authority, tmp_path):
    other = certificate_holder.parse(b"tuskline:log-server?name=one&streams=*")
    for host in (other.service_name("db-1"), other.service_name("10.0.0.1").upper()):
        with pytest.raises(UsageError, match="invalid host"):
            certificates.issue(authority, tmp_path / "out", name="x", uri=URI, hosts=(host,))


def test_only_a_certificate_with_hosts_may_be_a_servers(authority, tmp_path):
    for name, hosts in (("client", []), ("server", ["localhost"])):
        certificates.issue(authority, tmp_path / name, name=name, uri=URI, hosts=hosts)
        found = _certificate(tmp_path / name).extensions
        usages = found.get_extension_for_class(x509.ExtendedKeyUsage).value
        assert (ExtendedKeyUsageOID.SERVER_AUTH in usages) == bool(hosts)
        assert ExtendedKeyUsageOID.CLIENT_AUTH in usages
        assert not found.get_extension_for_class(x509.BasicConstraints).value.ca


def test_openssl_accepts_the_certificate_with_its_key_and_authority(authority, tmp_path):
    out = tmp_path / "out"
    certificates.issue(authority, out, name="s", uri=URI, hosts=["localhost"], days=7)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(out / "ca.pem"))
    context.load_cert_chain(out / "cert.pem", out / "key.pem")
    certificate = _certificate(out)
    ca = x509.load_pem_x509_certificate((out / "ca.pem").read_bytes())
    certificate.verify_directly_issued_by(ca)
    assert (
        timedelta(days=6) < certificate.not_valid_after_utc - datetime.now(UTC) < timedelta(days=8)
    )
    assert certificate.not_valid_before_utc < datetime.now(UTC) - timedelta(minutes=5)


def test_nothing_is_overwritten(authority, tmp_path):
    before = {each.name: each.read_bytes() for each in authority.iterdir()}
    done = _run("init", authority)
    assert done.returncode == Cause.CONFIG
    assert "it exists and is not an empty folder\nHINT:  name a new folder" in done.stderr
    certificates.issue(authority, tmp_path / "out", name="a", uri=URI)
    with pytest.raises(ConfigError, match="not an empty folder"):
        certificates.issue(authority, tmp_path / "out", name="a", uri=URI)
    with pytest.raises(ConfigError, match="not an empty folder"):
        certificates.issue(authority, authority, name="a", uri=URI)
    assert {each.name: each.read_bytes() for each in authority.iterdir()} == before
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        certificates.init_authority(tmp_path / "file")
    assert {each.name for each in tmp_path.iterdir()} == {"authority", "out", "file"}


def test_an_empty_folder_becomes_private(tmp_path):
    folder = tmp_path / "authority"
    folder.mkdir(mode=0o777)
    certificates.init_authority(folder)
    assert _modes(folder)["authority"] == 0o700


@pytest.mark.parametrize(
    ("arguments", "cause", "words"),
    [
        (["--role", "root", "--name", "a"], Cause.USAGE, "unknown role 'root'\nHINT:  use one of"),
        (["--role", "reader", "--name", "A b"], Cause.USAGE, "invalid name 'A b'"),
        (["--role", "reader", "--name", "a", "--host", "x"], Cause.USAGE, "--host is for servers"),
        (["--role", "log-server", "--name", "a"], Cause.USAGE, "needs --host"),
        (["--role", "log-server", "--name", "a", "--host", "a:1"], Cause.USAGE, "invalid host"),
        (["--role", "reader", "--name", "a", "--stream", "A"], Cause.CONFIG, "invalid stream name"),
        (
            ["--role", "repository", "--name", "a", "--host", "x", "--stream", "a"],
            Cause.USAGE,
            "a repository orders all streams",
        ),
        (
            ["--role", "reader", "--name", "a", "--days", "3651"],
            Cause.CONFIG,
            "outlives its authority",
        ),
    ],
)
def test_an_impossible_certificate_is_refused_by_cause(
    authority, tmp_path, arguments, cause, words
):
    done = _run("issue", authority, *arguments, "--out", tmp_path / "out")
    assert words in done.stderr
    assert done.returncode == cause
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_authority_is_refused(authority, tmp_path):
    done = _run(
        "issue", tmp_path, "--role", "reader", "--name", "a", "--out", tmp_path / "o", "--json"
    )
    error = json.loads(done.stderr)["error"]
    assert (error["code"], done.returncode) == ("CONFIG", Cause.CONFIG)
    assert "tuskline certs init" in error["repair"]

    certificates.init_authority(tmp_path / "other")
    (tmp_path / "other" / "ca.key").replace(authority / "ca.key")
    with pytest.raises(ConfigError, match="is not the key of"):
        certificates.issue(authority, tmp_path / "o", name="a", uri=URI)
    (authority / "ca.key").write_text("secret words")
    with pytest.raises(ConfigError, match="not readable as PEM") as caught:
        certificates.issue(authority, tmp_path / "o", name="a", uri=URI)
    assert "secret" not in str(caught.value)
    assert not (tmp_path / "o").exists()


def test_an_authority_whose_key_others_could_read_issues_nothing(authority, tmp_path):
    (authority / "ca.key").chmod(0o640)
    with pytest.raises(ConfigError, match=r"accessible to other accounts \(mode 0640\)"):
        certificates.issue(authority, tmp_path / "out", name="a", uri=URI)


def test_two_authorities_have_names_of_their_own(authority, tmp_path):
    certificates.init_authority(tmp_path / "other")
    names = {
        x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes()).subject
        for folder in (authority, tmp_path / "other")
    }
    assert len(names) == 2


def test_keys_are_of_the_curve_p256(authority, tmp_path):
    certificates.issue(authority, tmp_path / "out", name="a", uri=URI)
    for file in (authority / "ca.key", tmp_path / "out" / "key.pem"):
        key = serialization.load_pem_private_key(file.read_bytes(), None)
        assert key.curve.name == "secp256r1"  # type: ignore[union-attr]  # another kind fails


@pytest.mark.parametrize(
    "host",
    [
        *(
            "",
            "-a",
            "a b",
            "a/b",
            "tuskline:operator",
            "a" * 254,
            "*",
            "*.example",
            "db:7400",
            "db.",
        ),
        *(
            "a" * 64 + ".example",
            "db." + "a" * 64,
            "::",
            "[0::0]",
            "fe80::1%eth0",
            "[fe80::1%eth0]",
        ),
    ],
)
def test_a_host_that_is_none_is_refused(authority, tmp_path, host):
    with pytest.raises(UsageError, match="invalid host"):
        certificates.issue(authority, tmp_path / "out", name="a", uri=URI, hosts=[host])
    with pytest.raises(UsageError, match="invalid host"):
        certs.names(role=["log-server"], name="a", host=[host])


def test_the_longest_host_has_a_certificate_that_clients_accept(authority, tmp_path):
    host = ".".join(letter * 63 for letter in "abc")
    its = certificate_holder.identity("a", ["log-server"])
    certificates.issue(authority, tmp_path / "out", name="a", uri=its.uri(), hosts=[host])
    files = files_in(tmp_path / "out")
    assert files.names(host)
    found = files.load(server=True).names
    assert not certificate_holder.lacks(
        found, [certificate_holder.Role.LOG_SERVER], host=True, at=[host]
    )
    with pytest.raises(UsageError, match="invalid host"):
        certs.names(role=["log-server"], name="a", host=[host + "d"])


def test_a_full_or_unwritable_place_leaves_nothing(authority, tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Exception, match="the disk is full"):
        certificates.issue(authority, tmp_path / "out", name="a", uri=URI)
    assert {each.name for each in tmp_path.iterdir()} == {"authority"}


def test_a_folder_that_may_not_last_is_not_called_taken(authority, tmp_path, monkeypatch):
    def broken(_folder):
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(certificates, "sync_folder", broken)
    with pytest.raises(UnavailableError, match="was created, but may not outlast a power failure"):
        certificates.issue(authority, tmp_path / "out", name="a", uri=URI)


def _of_unknown_algorithm(pem: bytes, label: str) -> bytes:
    """The same PEM with another algorithm's number in place of that of elliptic curves."""
    ec, unknown = bytes.fromhex("06072a8648ce3d0201"), bytes.fromhex("06072a8648ce3d0209")
    der = ssl.PEM_cert_to_DER_cert(pem.decode().replace(label, "CERTIFICATE"))
    assert ec in der
    return ssl.DER_cert_to_PEM_cert(der.replace(ec, unknown)).replace("CERTIFICATE", label).encode()


@pytest.mark.parametrize(("name", "label"), [("ca.key", "PRIVATE KEY"), ("ca.pem", "CERTIFICATE")])
def test_an_authority_of_an_unsupported_algorithm_is_refused(authority, tmp_path, name, label):
    file = authority / name
    file.write_bytes(_of_unknown_algorithm(file.read_bytes(), label))
    done = _run("issue", authority, "--role", "reader", "--name", "a", "--out", tmp_path / "o")
    assert (done.returncode, "Traceback" in done.stderr) == (Cause.CONFIG, False)
    assert "is of an algorithm that is not supported\nHINT:  create an authority" in done.stderr
