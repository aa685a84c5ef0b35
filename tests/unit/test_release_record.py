"""The record of who had commits go on without a quorum."""

from dataclasses import replace

from walsender_bridge.provisioning import release_record
from walsender_bridge.provisioning.release_record import (
    FILE,
    ReleaseDecision,
    decisions,
    in_force,
    write,
)

RELEASE = ReleaseDecision(
    "release", "db:5432/x", "postgres", "0/3000000", "0/2000000", 7, "FIRST 1 (q)"
)
REQUIRE = ReleaseDecision("require", "db:5432/x", "postgres", "0/4000000", None, 0, "")


def test_28_a_release_stands_until_the_quorum_is_required_again(tmp_path):
    assert in_force(tmp_path / "log") is None
    written = write(tmp_path / "log", RELEASE)
    assert in_force(tmp_path / "log") == written
    assert written.by
    assert written.at
    assert "7 commits waited" in written.summary()
    write(tmp_path / "log", REQUIRE)
    assert in_force(tmp_path / "log") is None
    assert [each.action for each in decisions(tmp_path / "log")] == ["release", "require"]


def test_28_a_torn_line_hides_nothing_that_was_done(tmp_path):
    written = write(tmp_path, RELEASE)
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'{"action": "requ')
    assert in_force(tmp_path) == written
    write(tmp_path, REQUIRE)
    assert in_force(tmp_path) is None


def test_a_line_of_an_earlier_release_is_read_and_written_byte_for_byte(tmp_path, monkeypatch):
    monkeypatch.setattr(release_record, "_operator", lambda: "ann@host")
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.25)
    line = (
        b'{"action": "release", "server": "db:5432/x", "role": "postgres", "lsn": "0/3000000", "quorum_lsn": "0/2000000",'
        b' "waiting": 7, "names": "FIRST 1 (q)", "by": "ann@host", "at": 1700000000.25}\n'
    )
    write(tmp_path, RELEASE)
    assert (tmp_path / FILE).read_bytes() == line
    (tmp_path / FILE).write_bytes(line + line.replace(b'"waiting": 7', b'"waiting": "7"'))
    assert decisions(tmp_path) == [replace(RELEASE, by="ann@host", at=1_700_000_000.25)]
