"""What `doctor` and `status` say of the cluster of etcd: members, majority, space, version, certificates."""

import json
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.etcd import EtcdCluster, needs_etcd
from tests.support.tls import HOSTS, SERVER, Authority
from tests.support.waiting import wait_for
from walsender_bridge.cli.doctor import of_etcd
from walsender_bridge.config import Config, load_config
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.errors import Cause
from walsender_bridge.observability.observation import Observer

pytestmark = needs_etcd


def configured(folder: Path, etcd: EtcdCluster, more: str = "") -> Config:
    path = folder / "tuskline.toml"
    endpoints = json.dumps(etcd.endpoints)
    path.write_text(
        '[machine]\ndata_dir = "state"\nparts = ["repository"]\n'
        f'[log]\ndata_dir = "log"\nlisten = "127.0.0.1:{free_port()}"\nstore = "etcd"\n'
        f"[etcd]\nendpoints = {endpoints}\n{more}"
        f'[[log_server]]\nlisten = "127.0.0.1:{free_port()}"\n'
    )
    return load_config(path)


def faults(settings: Config) -> list[Finding]:
    return [each for each in of_etcd(settings) if each.severity is not Severity.OK]


def told(settings: Config) -> tuple[list[str], list[str]]:
    """What `status` says of etcd: problems, and what is degraded."""
    with Observer(settings) as observer:
        seen = observer.observe()
    found = [[e for e in each if e.startswith("etcd: ")] for each in (seen.problems, seen.degraded)]
    return found[0], found[1]


def alarm(etcd: EtcdCluster, action: str) -> None:
    def call(path: str, request: dict[str, Any]) -> dict[str, Any]:
        url, body = f"http://{etcd.endpoints[0]}/v3/{path}", json.dumps(request).encode()
        with urllib.request.urlopen(url, data=body, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    member = call("maintenance/status", {})["header"]["member_id"]
    call("maintenance/alarm", {"action": action, "memberID": member, "alarm": "NOSPACE"})


def test_members_majority_and_space_are_named(etcd: EtcdCluster, tmp_path: Path) -> None:
    settings = configured(tmp_path, etcd)
    (well,) = of_etcd(settings)
    assert (well.severity, well.cause) == (Severity.OK, Cause.SERVER_SETTING)
    assert well.what.startswith("3 of 3 members answer, version 3.")
    assert well.what.endswith("% of the quota used")
    assert told(settings) == ([], [])
    alarm(etcd, "ACTIVATE")
    try:
        (full,) = faults(settings)
    finally:
        alarm(etcd, "DEACTIVATE")
    assert (full.severity, full.cause) == (Severity.ERROR, Cause.DISK_FULL)
    assert "etcdctl alarm disarm" in full.repair
    assert settings.etcd is not None
    one = settings.etcd.model_copy(update={"endpoints": tuple(etcd.endpoints[:1])})
    named = settings.model_copy(update={"etcd": one})
    (some,) = faults(named)
    assert (some.severity, some.what) == (Severity.WARNING, "endpoints names 1 of 3 members")
    with etcd.whole_afterwards():
        etcd.kill(0)
        wait_for(lambda: etcd.is_healthy(1), 30, "the others go on")
        (away,) = faults(settings)
        assert (away.severity, away.where) == (Severity.WARNING, etcd.endpoints[0])
        assert away.what.startswith("the member does not answer: ")
        problems, degraded = told(settings)
        assert problems == []
        assert [each.split(" (")[0] for each in degraded] == [f"etcd: {away.what}"]
        etcd.kill(1)
        lost, *others = faults(settings)
        assert (lost.severity, lost.cause) == (Severity.ERROR, Cause.UNAVAILABLE)
        assert "no majority of its members answers (1 of 3 members answer)" in lost.what
        assert [each.where for each in others] == etcd.endpoints[:2]
        assert any("no majority" in each for each in told(settings)[0])


def test_a_certificate_that_etcd_does_not_accept_is_named(tmp_path: Path) -> None:
    authorities = []
    for name in ("own", "other"):
        folder = tmp_path / name
        folder.mkdir()
        authorities.append(Authority(folder))
    accepted = authorities[0].issue(*SERVER, hosts=HOSTS)
    stranger = authorities[1].issue("repository")
    with EtcdCluster(tmp_path, members=1, tls=accepted) as etcd:

        def settings(ca: Path, certificate: Path, key: Path) -> Config:
            lines = f'ca = "{ca}"\ncertificate = "{certificate}"\nkey = "{key}"\n'
            return configured(tmp_path, etcd, lines)

        well = settings(accepted.ca, accepted.certificate, accepted.key)
        wait_for(lambda: not faults(well), 60, "etcd answers")
        for files in (
            (accepted.ca, stranger.certificate, stranger.key),
            (stranger.ca, accepted.certificate, accepted.key),
        ):
            found = faults(settings(*files))
            assert {each.severity for each in found[:1]} == {Severity.ERROR}
            assert any("each side has to accept the other's" in each.repair for each in found), [
                (each.what, each.repair) for each in found
            ]
