"""What the configuration says arrives in the child processes: each field in the model of the process that needs it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from walsender_bridge.capture.gate.core import Rule
from walsender_bridge.capture.settings import CaptureSettings
from walsender_bridge.capture.source import CaptureSource
from walsender_bridge.change_log.replica.settings import ReplicaServerSettings
from walsender_bridge.cli import children
from walsender_bridge.config import Config, GateSection, SafekeepersSection, SourceSection
from walsender_bridge.quorum.proposer.effects import Limits
from walsender_bridge.quorum.proposer.settings import ProposerSettings
from walsender_bridge.quorum.safekeeper import hosting
from walsender_bridge.quorum.safekeeper.archive.settings import ArchiverSettings
from walsender_bridge.quorum.safekeeper.settings import SafekeeperSettings
from walsender_bridge.quorum.safekeeper.storage.segments import StorageLimits
from walsender_bridge.quorum.wal_server.settings import WalServerSettings
from walsender_bridge.quorum.wal_server.tls import TlsFiles
from walsender_bridge.runtime import json_model, shared_files, tls_files
from walsender_bridge.runtime.supervisor import Child

DSN = "host=db dbname=shop password=secret"
GATE = {
    "candidates": ["a", "b"],
    "quorum": 1,
    "on_missing": "degrade",
    "degrade_after": 7.5,
    "max_uncommitted_bytes": 1 << 21,
}
SAFEKEEPERS = {
    "local": 3,
    "addresses": ["sk1:7410", "sk2:7411", "[::1]:7412"],
    "application_name": "own_quorum",
    "slot": "own_physical",
    "max_queue_bytes": 96 << 20,
    "max_laggard_bytes": 128 << 20,
    "listen": "127.0.0.1:8410",
    "wal_listen": "[::1]:8420",
    "users": "/etc/users",
    "tls_cert": "/etc/cert",
    "tls_key": "/etc/key",
    "tls_client_ca": "/etc/ca",
    "wal_bytes": 256 << 20,
    "free_bytes": 5,
    "keep_bytes": 6,
    "max_slot_wal_keep_size": 7,
    "archive": "s3://bucket/wal",
}
SOURCE = {
    "name": "shop",
    "dsn": DSN,
    "tables": ["public.*", "!public.audit"],
    "slot": "own_slot",
    "publication": "own_publication",
    "spool_limit": 8,
    "gate": GATE,
}


@pytest.fixture
def whole(tmp_path, monkeypatch) -> dict[str, Any]:
    monkeypatch.setattr(shared_files, "_MEMORY", tmp_path / "shm")
    return {
        "log": {"data_dir": str(tmp_path / "log"), "listen": "127.0.0.1:8400"},
        "log_server": [{"data_dir": str(tmp_path / "log-server"), "listen": "127.0.0.1:8401"}],
        "safekeepers": SAFEKEEPERS,
        "source": [SOURCE],
    }


def made(values: dict[str, Any]) -> dict[str, Child]:
    """All children of a configuration, by name."""
    config = Config(**values)
    section, hosted = config.safekeepers, hosting.of_machine(config)
    found = [
        *children.replicas(config),
        *children.captures(config),
        *children.proposers(config),
        *children.safekeepers(hosted, section, tls=config.tls_files),
    ]
    return {each.name: each for each in found}


def received(child: Child, kind: type[Any]) -> Any:
    return json_model.decode(kind, child.stdin, strict=True)


def test_the_settings_of_each_child_of_a_bridge(whole):
    config, found = Config(**whole), made(whole)
    rule = Rule(("a", "b"), False, 1, "degrade", 7.5, safekeepers=True)
    assert received(found["capture-shop"], CaptureSettings) == CaptureSettings(
        CaptureSource("shop", DSN, "own_slot", "own_publication", ("public.*", "!public.audit")),
        log="grpc://127.0.0.1:8400",
        spool=config.data_dir / "spool" / "shop",
        spool_limit=8,
        gate_record=config.data_dir / "gate" / "shop.jsonl",
        gate=rule,
        commit_page=config.commit_page,
        max_uncommitted_bytes=1 << 21,
        status_file=config.run_dir / "capture-shop.status.json",
    )
    assert received(found["proposer"], ProposerSettings) == ProposerSettings(
        DSN,
        (("sk1", 7410), ("sk2", 7411), ("::1", 7412)),
        "own_quorum",
        "own_physical",
        replace(Limits(), queue_bytes=84 << 20, max_laggard_bytes=128 << 20),
        members_file=config.members_request,
        quorum_file=config.quorum_id_file,
        commit_page=config.commit_page,
        status_file=config.proposer_status,
    )


def test_a_gate_of_members_without_safekeepers(whole):
    gate = {"members": ["a", "b"], "safekeepers": False}
    found = made(whole | {"source": [SOURCE | {"gate": gate}]})
    settings = received(found["capture-shop"], CaptureSettings)
    assert settings.gate == Rule(("a", "b"), members=True)
    assert settings.commit_page is None


def test_proposer_and_safekeepers_get_the_certificate_of_the_machine(whole, tmp_path):
    paths = {name: tmp_path / f"{name}.pem" for name in ("ca", "certificate", "key")}
    found = made(whole | {"tls": paths})
    assert received(found["proposer"], ProposerSettings).tls == tls_files.TlsFiles(**paths)
    assert received(found["safekeeper-2"], SafekeeperSettings).tls == tls_files.TlsFiles(**paths)


def test_the_settings_of_each_child_of_a_log_server(whole, tmp_path):
    config, found = Config(**whole), made(whole)
    place = tmp_path / "log-server"
    memory = shared_files.folder(config.run_dir)
    assert received(found["replicas"], ReplicaServerSettings) == ReplicaServerSettings(
        place, "127.0.0.1:8401", create=False
    )
    data = place / "safekeeper-2"
    assert received(found["safekeeper-2"], SafekeeperSettings) == SafekeeperSettings(
        data,
        "127.0.0.1",
        8411,
        memory / "positions-2",
        StorageLimits(wal_bytes=256 << 20, free_bytes=5),
        keep_bytes=6,
        archive="s3://bucket/wal",
        max_slot_wal_keep_size=7,
        status_file=memory / "safekeeper-2.json",
    )
    assert received(found["wal-server-2"], WalServerSettings) == WalServerSettings(
        data / "wal",
        memory / "positions-2",
        data / "slots",
        Path("/etc/users"),
        "::1",
        8421,
        TlsFiles(Path("/etc/cert"), Path("/etc/key"), Path("/etc/ca")),
        status_file=memory / "wal-server-2.json",
        max_slot_wal_keep_size=7,
    )
    assert received(found["archiver-2"], ArchiverSettings) == ArchiverSettings(
        data, "s3://bucket/wal", memory / "archiver-2.json"
    )


#: Keys that change which children there are, or which source they serve, and not the settings of one.
STRUCTURE = {"local", "source", "name"}
OTHERWISE = {
    SourceSection: {
        "dsn": "host=other",
        "tables": [],
        "slot": "x",
        "publication": "x",
        "spool_limit": 9,
        "gate": None,
    },
    GateSection: {
        "candidates": ["a", "c"],
        "members": ["a", "c"],
        "quorum": 2,
        "on_missing": "block",
        "degrade_after": 8.0,
        "safekeepers": False,
        "max_uncommitted_bytes": 1 << 22,
    },
    SafekeepersSection: {
        "addresses": ["sk1:7410"],
        "application_name": "x",
        "slot": "x",
        "max_queue_bytes": 97 << 20,
        "max_laggard_bytes": 129 << 20,
        "listen": "127.0.0.1:8510",
        "wal_listen": "127.0.0.1:8520",
        "data_dir": "/x",
        "users": "/x",
        "tls_cert": "/x",
        "tls_key": "/x",
        "tls_client_ca": "/x",
        "wal_bytes": 257 << 20,
        "free_bytes": 9,
        "keep_bytes": 9,
        "max_slot_wal_keep_size": -1,
        "archive": "file:///x",
    },
}


@pytest.mark.parametrize("section", OTHERWISE, ids=lambda section: section.__name__)
def test_every_key_of_a_section_reaches_a_child(whole, section):
    assert OTHERWISE[section].keys() == section.model_fields.keys() - STRUCTURE
    before = {name: child.stdin for name, child in made(whole).items()}
    for key, value in OTHERWISE[section].items():
        values = dict(whole)
        if section is SafekeepersSection:
            values["safekeepers"] = SAFEKEEPERS | {key: value}
        elif section is SourceSection:
            values["source"] = [SOURCE | {key: value}]
        else:
            gate = GATE | {key: value}
            if key == "members":
                del gate["candidates"]
            values["source"] = [SOURCE | {"gate": gate}]
        after = {name: child.stdin for name, child in made(values).items()}
        assert after != before, f"{key} reaches no child"


def test_no_argument_of_a_child_holds_a_setting(whole):
    for name, child in made(whole).items():
        assert [*child.argv][1:2] == ["-m"]
        assert [*child.argv][3:] == [name]
        assert "secret" not in repr(child)


def test_a_client_ca_without_a_certificate_is_refused(whole):
    section = {"local": 1, "tls_client_ca": "/etc/ca"}
    with pytest.raises(ValueError, match="tls_client_ca needs tls_cert and tls_key"):
        Config(**(whole | {"safekeepers": section}))
