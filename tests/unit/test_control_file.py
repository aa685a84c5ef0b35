"""Acceptance 25: a control file that is corrupt, newer, or missing is refused by name; an older one is upgraded."""

import random
from dataclasses import replace

import pytest

from tests.support.control_state import STATE
from tests.support.simulated_disk import PowerCutError, SimulatedDisk
from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.quorum.protocol.messages import NodeId
from walsender_bridge.quorum.safekeeper import control_file
from walsender_bridge.quorum.safekeeper.effects import ControlState
from walsender_bridge.runtime import record_file
from walsender_bridge.runtime.folder import FolderDisk


@pytest.fixture
def disk(tmp_path):
    return FolderDisk(tmp_path / "data")


@pytest.mark.parametrize("state", [STATE, ControlState(safekeeper=1)])
def test_it_says_what_was_written(disk, state):
    assert control_file.load(disk) is None
    control_file.save(disk, state)
    assert control_file.load(disk) == state
    assert disk.names() == {"control"}


def test_25_one_from_before_anybody_was_distrusted_is_read(disk):
    record = control_file.to_record(STATE)
    del record["configuration"]["distrusted"], record["configuration"]["quorum"]
    data = record_file.pack(control_file.MAGIC, 1, record)
    (disk.folder / "control").write_bytes(data)
    found = control_file.load(disk)
    assert found is not None
    assert found.configuration == replace(STATE.configuration, distrusted=frozenset(), quorum=0)


def test_25_a_damaged_one_is_refused_and_kept(disk, seed):
    rng = random.Random(seed)
    control_file.save(disk, STATE)
    data = (disk.folder / "control").read_bytes()
    for number in range(1, 60):
        at = rng.randrange(len(data))
        kind = rng.randrange(3)
        damaged = [data[:at], data + b"x", data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]][kind]
        (disk.folder / "control").write_bytes(damaged)
        with pytest.raises(CorruptError, match=r"is damaged.*renamed to control\.corrupt"):
            control_file.load(disk)
        assert (disk.folder / f"control.corrupt-{number}").read_bytes() == damaged
        assert not (disk.folder / "control").exists()
        # It does not become a new safekeeper by that.
        with pytest.raises(CorruptError, match=r"missing, but the folder holds control\.corrupt-1"):
            control_file.load(disk)


def test_25_a_missing_one_beside_anything_is_refused(disk):
    (disk.folder / "wal").mkdir()
    with pytest.raises(
        CorruptError, match=r"(?s)missing, but the folder holds wal.*safekeeper replace"
    ):
        control_file.load(disk)


def test_25_a_newer_one_is_refused_by_its_number_and_left(disk):
    data = record_file.pack(control_file.MAGIC, 7, {"whatever": 1})
    (disk.folder / "control").write_bytes(data)
    with pytest.raises(
        NotSupportedError, match=r"unsupported format 7 \(this version supports 1 to 2"
    ):
        control_file.load(disk)
    assert (disk.folder / "control").read_bytes() == data


def test_25_one_from_before_quorums_had_ids_is_upgraded(disk):
    older = control_file.to_record(STATE)
    del older["configuration"]["quorum"]
    (disk.folder / "control").write_bytes(record_file.pack(control_file.MAGIC, 1, older))
    without = replace(STATE, configuration=replace(STATE.configuration, quorum=0))
    assert control_file.load(disk) == without
    version, _ = record_file.unpack((disk.folder / "control").read_bytes(), control_file.MAGIC, 2)
    assert version == 2


@pytest.mark.parametrize(
    "change",
    [
        {"node_id": [1]},
        {"history": [[5, 1, 1], [4, 2, 1]]},
        {"safekeeper": None},
        {"configuration": {}},
        {"fence": {"x": 1}},
    ],
)
def test_25_a_record_that_makes_no_sense_is_damage(disk, change):
    record = control_file.to_record(STATE) | change
    (disk.folder / "control").write_bytes(record_file.pack(control_file.MAGIC, 1, record))
    with pytest.raises(CorruptError, match="control file is damaged"):
        control_file.load(disk)


def test_23_a_power_cut_leaves_the_old_or_the_new(seed):
    """At each operation of a replacement, in many ways that a disk can lose what was not synced."""
    after = replace(STATE, node_id=NodeId(10, 1))
    seen = set()
    for number in range(200):
        disk = SimulatedDisk(random.Random(seed * 1000 + number))
        control_file.save(disk, STATE)
        disk.cut_at = number % 5
        with pytest.raises(PowerCutError):
            control_file.save(disk, after)
        disk.restart()
        found = control_file.load(disk)
        assert found in (STATE, after)
        seen.add(found)
    assert seen == {STATE, after}
