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
from walsender_bridge.runtime import checksummed_json, json_model

EPOCH = FeedbackEpochKey(7, 1, 100, "standby_a", "abc", 42, 200, 300)
RECORD = StandbyRecord(
    EPOCH,
    400,
    generation=17,
    copies={
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
)
#: The file of that record, as earlier releases write it.
CONTENT = (
    b'{"version": 6, "record": {"epoch": {"system_id": 7, "timeline": 1, "primary_start": 100, "physical_slot":'
    b' "standby_a", "incarnation_id": "abc", "walsender_pid": 42, "walsender_start": 200, "conf_load_time": 300},'
    b' "walreceiver_start": 400, "generation": 17, "copies": {"a": {"name": "a", "created": false, "temporary_name":'
    b' "_tuskline_tmp_a", "incarnation_id": null, "renaming": false, "generation": 0, "seen": {"clock": 5,'
    b' "flush_lsn": 6}, "removed_before": null, "reserved": null, "decoded_at": null, "slot_was": null, "passed":'
    b' null, "confirmed": null, "settled": null, "incarnation": null, "synced_at": null, "seen_on_primary": false,'
    b' "proven_in": null, "polls_gone": 0, "polls_ahead": 0, "state": "", "proven_at": null}, "b": {"name": "b",'
    b' "created": true, "temporary_name": null, "incarnation_id": null, "renaming": false, "generation": 0, "seen":'
    b' null, "removed_before": null, "reserved": {"restart_lsn": 5, "catalog_xmin": 6}, "decoded_at": null,'
    b' "slot_was": null, "passed": {"confirmed_flush_lsn": 7, "catalog_xmin": 8}, "confirmed": {"timeline": 1,'
    b' "lsn": 9}, "settled": {"datoid": 5, "xmin": 6, "lsn": 7}, "incarnation": {"incarnation_id": "l1", "lsn": 8},'
    b' "synced_at": null, "seen_on_primary": false, "proven_in": {"system_id": 7, "timeline": 1, "primary_start":'
    b' 100, "physical_slot": "standby_a", "incarnation_id": "abc", "walsender_pid": 42, "walsender_start": 200,'
    b' "conf_load_time": 300}, "polls_gone": 2, "polls_ahead": 0, "state": "", "proven_at": 9}}}, "crc32c":'
    b" 4117277375}"
)


@pytest.mark.parametrize("record", [StandbyRecord(), RECORD])
def test_what_was_saved_is_read_back(tmp_path, record):
    file = RecordFile(tmp_path / "made", "one")
    assert file.load() == StandbyRecord()
    file.save(record)
    assert RecordFile(tmp_path / "made", "one").load() == record
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["one.json"]


def test_a_file_of_an_earlier_release_is_read_and_written_byte_for_byte(tmp_path):
    file = RecordFile(tmp_path, "one")
    file.path.write_bytes(CONTENT)
    assert file.load() == RECORD
    file.save(RECORD)
    assert file.path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    "change",
    [
        {"generation": "17"},
        {"copies": {"a": {"name": 7}}},
        {"copies": {"a": {"name": "a", "b": 1}}},
    ],
)
def test_one_with_a_value_of_another_type_is_damaged(tmp_path, change):
    """Though its checksum is right."""
    file = RecordFile(tmp_path, "one")
    record = json_model.plain(RECORD) | change
    checksummed_json.save(file.path, {"version": 6, "record": record})
    assert file.load() == StandbyRecord()
    assert (tmp_path / "one.json.damaged-1").exists()


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
    file.path.write_text(json.dumps({"version": 7, "anything": 1}))
    with pytest.raises(NotSupportedError, match="version 7"):
        file.load()
    assert file.path.exists()


def test_one_that_cannot_be_written_says_so_and_the_old_one_stays(tmp_path):
    file = RecordFile(tmp_path, "one")
    file.save(RECORD)
    (tmp_path / "blocked").write_text("")
    with pytest.raises(ConfigError, match="could not write"):
        RecordFile(tmp_path / "blocked", "one").save(RECORD)
    assert file.load() == RECORD
