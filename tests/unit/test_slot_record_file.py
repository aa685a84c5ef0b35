"""The record of copies: read back as it was, replaced as a whole, kept aside when it is damaged."""

import json
from dataclasses import replace

import pytest

from slot_sync.record_file import RecordFile
from slot_sync.resolver.observed import (
    Confirmed,
    CopyRecord,
    EpochKey,
    Place,
    Record,
    Reserved,
    Sighting,
)
from walsender_bridge.errors import ConfigError, NotSupportedError

EPOCH = EpochKey(7, 1, 100, "standby_a", "abc", 42, 200, 300)
RECORD = Record(
    EPOCH,
    400,
    {
        "a": CopyRecord("a", temporary_name="_tuskline_tmp_a", seen=Sighting(5, 6)),
        "b": CopyRecord(
            "b",
            made=True,
            proven_in=EPOCH,
            polls_gone=2,
            proven_at=9,
            reserved=Reserved(5, 6),
            passed=Place(7, 8),
            confirmed=Confirmed(1, 9),
        ),
    },
    17,
)


@pytest.mark.parametrize("record", [Record(), RECORD])
def test_what_was_saved_is_read_back(tmp_path, record):
    file = RecordFile(tmp_path / "made", "one")
    assert file.load() == Record()
    file.save(record)
    assert RecordFile(tmp_path / "made", "one").load() == record
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["one.json"]


def test_one_of_the_first_version_is_read(tmp_path):
    file = RecordFile(tmp_path, "one")
    file.save(RECORD)
    values = json.loads(file.path.read_text())
    values["version"] = 1
    for copy in values["record"]["copies"].values():
        del copy["confirmed"]
    file.path.write_text(json.dumps(values))
    known = file.load().of("b")
    assert known == replace(RECORD.of("b"), confirmed=None)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": "1"}', '{"version": 1, "record": {}}', "\x00" * 10]
)
def test_a_damaged_one_is_kept_aside_and_nothing_is_remembered(tmp_path, text):
    file = RecordFile(tmp_path, "one")
    for number in (1, 2):
        file.path.write_text(text)
        assert file.peek() is None
        assert file.load() == Record()
        assert (tmp_path / f"one.json.damaged-{number}").read_text() == text
        assert not file.path.exists()


def test_a_newer_one_is_refused_by_name_and_left_alone(tmp_path):
    file = RecordFile(tmp_path, "one")
    file.path.write_text(json.dumps({"version": 3, "anything": 1}))
    with pytest.raises(NotSupportedError, match="version 3"):
        file.load()
    assert file.path.exists()


def test_one_that_cannot_be_written_says_so_and_the_old_one_stays(tmp_path):
    file = RecordFile(tmp_path, "one")
    file.save(RECORD)
    (tmp_path / "blocked").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        RecordFile(tmp_path / "blocked", "one").save(RECORD)
    assert file.load() == RECORD
