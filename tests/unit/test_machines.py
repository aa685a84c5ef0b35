"""A configuration for each kind of machine: what runs there, what it needs, and what contradicts it."""

from pathlib import Path

import pytest

from tests.support.machine_files import KINDS, SECTIONS, machine
from tests.support.waiting import wait_for
from walsender_bridge.capture import stream_record
from walsender_bridge.change_log.repository.etcd import EtcdSettings
from walsender_bridge.cli import children, parts
from walsender_bridge.cli.bridge_election import BridgeElection
from walsender_bridge.cli.bridge_reach import LogReach
from walsender_bridge.cli.options import need_here
from walsender_bridge.config import load_config
from walsender_bridge.demo.local_server import free_port
from walsender_bridge.errors import ConfigError
from walsender_bridge.observability import bridge_view
from walsender_bridge.observability.bridge_view import ACTIVE, STANDING_BY, UNSURE, BridgeStatus
from walsender_bridge.observability.observation import Observer
from walsender_bridge.provisioning.configured import known_of
from walsender_bridge.quorum.safekeeper import hosting
from walsender_bridge.runtime import status_file

#: The processes of each, by their supervisor.
PROCESSES = {
    "log-server": {"log-server": {"replicas"}},
    "safekeepers": {"log-server": {"safekeeper-1", "wal-server-1"}},
    "repository": {"bridge": set()},
    "bridge": {"bridge": {"capture-shop", "proposer"}},
    "lake": {"lake": set(), "maintain": set()},
    "slots": {"slots": set()},
}


def loaded(folder: Path, text: str):
    path = folder / "tuskline.toml"
    path.write_text(text)
    return load_config(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_machine_of_one_kind_runs_the_processes_of_that_kind_alone(tmp_path, kind):
    settings = loaded(tmp_path, machine(kind))
    assert settings.run_dir == tmp_path / "state" / "run"
    found: dict[str, set[str]] = {name: set() for name in parts.commands(settings)}
    hosted = hosting.of_machine(settings)
    if "log-server" in found:
        own = [*children.replicas(settings), *children.safekeepers(hosted, settings.safekeepers)]
        found["log-server"] = {each.name for each in own}
    if "bridge" in found:
        own = [*children.captures(settings), *children.proposers(settings)]
        found["bridge"] = {each.name for each in own}
    assert found == PROCESSES[kind]
    for other in set(KINDS) - {kind}:
        with pytest.raises(ConfigError, match="on another machine"):
            need_here(settings, other)


def test_a_safekeeper_beside_the_lake_starts_no_proposer(tmp_path):
    settings = loaded(tmp_path, machine("lake", "safekeepers"))
    assert settings.quorum_source is None
    parts.refuse_quorum_of_one(settings)
    assert parts.commands(settings).keys() == {"lake", "log-server", "maintain"}
    assert children.captures(settings) == children.proposers(settings) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_without_what_it_needs_is_named(tmp_path, kind):
    text = machine(kind).removesuffix(SECTIONS[kind])
    with pytest.raises(ConfigError, match=f"and machine.parts names the {kind}") as caught:
        loaded(tmp_path, text)
    assert f'remove "{kind}" from machine.parts' in caught.value.repair


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("log-server", "log_server.data_dir"),
        ("safekeepers", "safekeepers.local"),
        ("repository", "log.data_dir"),
    ],
)
def test_what_is_kept_here_for_a_part_that_is_elsewhere_is_refused(tmp_path, kind, key):
    text = machine(kind, "lake").replace(f'"{kind}", ', "", 1)
    with pytest.raises(ConfigError, match=f"{key} is for the {kind} of this machine") as caught:
        loaded(tmp_path, text)
    assert f'add "{kind}" to machine.parts' in caught.value.repair


def test_the_folder_of_safekeepers_does_not_depend_on_what_is_added_later(tmp_path):
    alone = machine("safekeepers")
    with pytest.raises(ConfigError, match=r"safekeepers\.data_dir' is missing"):
        loaded(tmp_path, alone.replace('data_dir = "wal"\n', ""))
    before = hosting.of_machine(loaded(tmp_path, alone))[0].data_dir
    after = hosting.of_machine(loaded(tmp_path, machine("safekeepers", "log-server")))[0].data_dir
    assert before == after == tmp_path / "wal" / "safekeeper"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[machine]\nparts = ["lake"]\n', "machine.data_dir"),
        ('[machine]\ndata_dir = "x"\nparts = []\n', "machine.parts"),
        ('[machine]\ndata_dir = "x"\nparts = ["spark"]\n', "machine.parts"),
        (
            machine("log-server").replace('"state"', '"replicas"'),
            "machine.data_dir and log_server.0.data_dir are both",
        ),
        (machine("lake").replace('"state"', '"lake"'), "lake.uri and machine.data_dir"),
        (SECTIONS["log-server"] + SECTIONS["lake"], "'log.data_dir' is missing"),
        (SECTIONS["repository"] + SECTIONS["log-server"], "'source' is missing"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path, text)


@pytest.mark.parametrize("kind", ["log-server", "safekeepers"])
def test_a_machine_does_not_ask_for_what_is_elsewhere(tmp_path, kind):
    """No log, source or lake is asked, and none is missed."""
    with Observer(loaded(tmp_path, machine(kind))) as observer:
        seen = observer.observe()
    assert (seen.sources, seen.log, seen.lake, seen.slots, seen.errors) == (
        [],
        None,
        None,
        None,
        {},
    )
    assert not any(part in " ".join(seen.problems) for part in ("log:", "lake", "source", "quorum"))


ETCD = 'store = "etcd"\nrepositories = ["127.0.0.1:7400", "10.0.0.2:7400"]\n[etcd]\nendpoints = ["127.0.0.1:2379"]\n'


def of_etcd(*kinds: str, elect: bool = False) -> str:
    """The file of a machine with a repository over etcd."""
    text = machine(*kinds).replace('[log]\ndata_dir = "log"\n', f'[log]\ndata_dir = "log"\n{ETCD}')
    return text.replace("[machine]\n", "[machine]\nelect_bridge = true\n") if elect else text


def test_repositories_and_bridges_may_be_on_several_machines(tmp_path):
    settings = loaded(tmp_path, of_etcd("repository", "bridge", elect=True))
    assert settings.log_address == "grpc://127.0.0.1:7400,10.0.0.2:7400"
    # Where no repository is, their addresses are enough.
    elsewhere = machine("lake") + '[log]\nrepositories = ["10.0.0.1:7400", "10.0.0.2:7400"]\n'
    assert loaded(tmp_path, elsewhere).log_address == "grpc://10.0.0.1:7400,10.0.0.2:7400"
    everywhere = of_etcd("repository").replace('"log"\n', '"log"\nlisten = "*:7400"\n')
    tls = '[tls]\nca = "ca"\ncertificate = "cert"\nkey = "key"\n'
    assert loaded(tmp_path, everywhere + tls).log.listen == "*:7400"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            machine("repository").replace('"log"\n', '"log"\nrepositories = ["127.0.0.1:7400"]\n'),
            "several repositories need a store that all of them reach",
        ),
        (
            of_etcd("repository").replace('"127.0.0.1:7400", ', ""),
            r"log\.repositories lacks 127\.0\.0\.1:7400",
        ),
        (
            machine("lake") + '[etcd]\nendpoints = ["127.0.0.1:2379"]\n',
            "etcd is for the repository of this machine",
        ),
        (machine("lake") + '[log]\nstore = "etcd"\n', r"log\.store is for the repository"),
        (of_etcd("repository", elect=True), "elect_bridge is for the bridge of this machine"),
        (
            machine("bridge").replace("[machine]\n", "[machine]\nelect_bridge = true\n"),
            r"elected in etcd, and there is no \[etcd\]",
        ),
        (
            machine("repository", "bridge").replace(
                "[machine]\n", "[machine]\nelect_bridge = true\n"
            ),
            r"elected in etcd, and there is no \[etcd\]",
        ),
    ],
)
def test_repositories_or_bridges_that_could_not_replace_each_other_are_refused(
    tmp_path, text, message
):
    with pytest.raises(ConfigError, match=message) as refused:
        loaded(tmp_path, text)
    assert refused.value.repair


def test_what_a_capture_said_of_a_log_in_etcd_counts_after_a_restart(tmp_path, monkeypatch):
    """Without a database beside it: `doctor` and `up` then know where the stream ends while the log does not answer."""
    asked = []
    monkeypatch.setattr(stream_record, "ask", lambda *given: asked.append(given))
    settings = loaded(tmp_path, of_etcd("repository", "bridge"))
    (source,) = settings.source
    known_of(settings, source)
    assert asked == [(settings.log_address, settings.capture_status(source), "shop")]


def test_a_bridge_that_stands_by_is_the_bridge_of_another_machine(tmp_path):
    settings = loaded(tmp_path, of_etcd("repository", "bridge", elect=True))
    assert bridge_view.observe(settings) is None
    settings.run_dir.mkdir(parents=True)

    def becomes(status: BridgeStatus):
        status_file.write(bridge_view.status_path(settings.run_dir), status)
        return bridge_view.without_standby(settings, bridge_view.observe(settings))

    elsewhere = becomes(BridgeStatus(state=STANDING_BY, active_at="10.0.0.2:7400"))
    assert elsewhere.parts == {"repository"}
    assert elsewhere.quorum_source is None
    with Observer(settings) as observer:
        seen = observer.observe()
    assert (seen.sources, seen.quorum) == ([], None)
    assert seen.bridge is not None
    assert seen.bridge.sentence == "standing by, the one at 10.0.0.2:7400 is active"
    assert not any("bridge" in problem for problem in seen.problems)
    for state in (ACTIVE, UNSURE):
        assert becomes(BridgeStatus(state=state)).parts == {"repository", "bridge"}


def test_a_bridge_without_etcd_stands_by_until_it_has_been_elected(tmp_path):
    """And one that was active goes on with its proposer alone."""
    changes: list[None] = []
    cluster = EtcdSettings((f"127.0.0.1:{free_port()}",), lease=2.0)
    reach = LogReach(loaded(tmp_path, machine("bridge")), 1.0)
    election = BridgeElection(cluster, "here", tmp_path, lambda: changes.append(None), reach)

    def status() -> BridgeStatus | None:
        return status_file.read(bridge_view.status_path(tmp_path), BridgeStatus)

    election.start()
    try:
        seen = wait_for(status, 20, "it reports")
        assert (seen.state, changes) == (STANDING_BY, [])
        assert "nothing of it runs here: etcd does not answer" in seen.problem
        election.state = ACTIVE
        wait_for(lambda: election.state == UNSURE, 20, "it is unsure")
        assert len(changes) == 1
        seen = wait_for(lambda: (s := status()) and s.state == UNSURE and s, 5, "it reports")
        assert "only the proposer runs here" in seen.problem
    finally:
        election.stop()
    assert status() is None
