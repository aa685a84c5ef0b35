"""The record of copies: read back as it was, replaced as a whole, kept aside when it is damaged."""

import contextlib
import json

import pytest

from slot_sync.record_file import RecordFile
from slot_sync.resolver.observed import (
    Confirmed,
    CopyRecord,
    FeedbackEpochKey,
    Incarnation,
    Reserved,
    Settled,
    Sighting,
    SlotPosition,
    StandbyRecord,
)
from walsender_bridge.errors import ConfigError, NotSupportedError

EPOCH = FeedbackEpochKey(7, 1, 100, "standby_a", "abc", 42, 200, 300)
RECORD = StandbyRecord(
    EPOCH,
    400,
    {
        "a": CopyRecord("a", temporary_name="_tuskline_tmp_a", seen=Sighting(5, 6)),
        "b": CopyRecord(
            "b",
            created=True,
            proven_in=EPOCH,
            polls_gone=2,
            proven_at=9,
            reserved=Reserved(5, 6),
            passed=SlotPosition(7, 8),
            confirmed=Confirmed(1, 9),
            settled=Settled(5, 6, 7),
            incarnation=Incarnation("l1", 8),
        ),
    },
    17,
)


@pytest.mark.parametrize("record", [StandbyRecord(), RECORD])
def test_what_was_saved_is_read_back(tmp_path, record):
    file = RecordFile(tmp_path / "made", "one")
    assert file.load() == StandbyRecord()
    file.save(record)
    assert RecordFile(tmp_path / "made", "one").load() == record
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["one.json"]


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": "1"}', '{"version": 1, "record": {}}', "\x00" * 10]
)
def test_a_damaged_one_is_kept_aside_and_nothing_is_remembered(tmp_path, text):
    file = RecordFile(tmp_path, "one")
    for number in (1, 2):
        file.path.write_text(text)
        assert file.peek() is None
        assert file.load() == StandbyRecord()
        assert (tmp_path / f"one.json.damaged-{number}").read_text() == text
        assert not file.path.exists()


def test_one_with_a_changed_digit_or_letter_is_not_believed(tmp_path):
    """A position, an epoch or a mark that is another one can have a copy called ready which nobody has proven."""
    file = RecordFile(tmp_path, "one")
    file.save(RECORD)
    whole = file.path.read_bytes()
    believed = []
    for at, byte in enumerate(whole):
        file.path.write_bytes(whole[:at] + bytes([byte ^ 1]) + whole[at + 1 :])
        with contextlib.suppress(NotSupportedError):
            if (found := file.peek()) is not None and found != RECORD:
                believed.append(at)
    assert believed == []


def test_a_newer_one_is_refused_by_name_and_left_alone(tmp_path):
    file = RecordFile(tmp_path, "one")
    file.path.write_text(json.dumps({"version": 6, "anything": 1}))
    with pytest.raises(NotSupportedError, match="version 6"):
        file.load()
    assert file.path.exists()


def test_one_that_cannot_be_written_says_so_and_the_old_one_stays(tmp_path):
    file = RecordFile(tmp_path, "one")
    file.save(RECORD)
    (tmp_path / "blocked").write_text("")
    with pytest.raises(ConfigError, match="could not write"):
        RecordFile(tmp_path / "blocked", "one").save(RECORD)
    assert file.load() == RECORD
