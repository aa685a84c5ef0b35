"""A log server's own name: a damaged one is said, an older file is read."""

import contextlib
import json
from pathlib import Path

import google_crc32c
import pytest

from walsender_bridge.change_log.replica import identity as log_server_identity
from walsender_bridge.errors import CorruptError, NotSupportedError


def test_a_log_server_finds_its_name_again(tmp_path: Path) -> None:
    log_server_identity.make(tmp_path)
    assert len(log_server_identity.load(tmp_path)) == 36


def test_every_bit_of_the_name_is_covered(tmp_path: Path) -> None:
    log_server_identity.make(tmp_path)
    path = tmp_path / "log-server.json"
    name, content = log_server_identity.load(tmp_path), path.read_bytes()
    for at in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[at // 8] ^= 1 << at % 8
        path.write_bytes(damaged)
        with contextlib.suppress(CorruptError, NotSupportedError):
            assert log_server_identity.load(tmp_path) == name


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{}", b"\xff", b'{"format": 1, "log_server_id": 7}']
)
def test_a_file_that_holds_no_name_is_damage(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log-server.json").write_bytes(content)
    with pytest.raises(CorruptError, match="could not read the log server's id"):
        log_server_identity.load(tmp_path)


def test_the_checksum_of_an_earlier_version_counts(tmp_path: Path) -> None:
    record = {"format": 1, "log_server_id": "k", "crc": google_crc32c.value(b"k")}
    (tmp_path / "log-server.json").write_text(json.dumps(record))
    assert log_server_identity.load(tmp_path) == "k"
    (tmp_path / "log-server.json").write_text(json.dumps({**record, "log_server_id": "j"}))
    with pytest.raises(CorruptError, match="'j' does not match its checksum"):
        log_server_identity.load(tmp_path)


def test_a_newer_format_is_named_though_it_may_be_sealed_otherwise(tmp_path: Path) -> None:
    (tmp_path / "log-server.json").write_text(
        json.dumps({"format": 2, "log_server_id": {"name": "k"}})
    )
    with pytest.raises(NotSupportedError, match="format 2"):
        log_server_identity.load(tmp_path)


def test_a_file_without_a_checksum_is_read(tmp_path: Path) -> None:
    (tmp_path / "log-server.json").write_text(json.dumps({"format": 1, "log_server_id": "k"}))
    assert log_server_identity.load(tmp_path) == "k"
