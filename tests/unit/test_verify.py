"""What `tuskline safekeeper verify` finds: damage, and the first difference below what is committed."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.wal import MIB, SMALL, Wal
from walsender_bridge.errors import ConfigError, CorruptError, DivergedError
from walsender_bridge.quorum.protocol.messages import ServerInfo
from walsender_bridge.quorum.safekeeper import control_file
from walsender_bridge.quorum.safekeeper.effects import ControlState
from walsender_bridge.quorum.safekeeper.storage import position_file
from walsender_bridge.quorum.safekeeper.storage.segments import StorageLimits
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage
from walsender_bridge.quorum.safekeeper.verify import DataDirectory, HeldWal, check, compare
from walsender_bridge.runtime.folder import FolderDisk

SERVER = ServerInfo(SMALL.system_id, SMALL.major, SMALL.segment_bytes)


def no_progress(what: str, done: int, whole: int) -> None:
    assert done <= whole, what


def grown(seed: int, to: int = 4 * MIB + 5000) -> Wal:
    wal = Wal()
    wal.fill(to, random.Random(seed), largest=2000)
    return wal


def store(
    folder: Path, wal: Wal, *, commit: int, begin: int = MIB, crash: bool = False
) -> DataDirectory:
    """A safekeeper's data directory that holds this WAL."""
    state = ControlState(int(folder.name) + 1, SERVER, commit_lsn=commit)
    control_file.save(FolderDisk(folder / "control"), state)
    storage = WalStorage(FolderDisk(folder / "wal"), SMALL, StorageLimits(free_bytes=0))
    storage.open()
    storage.reset(begin)
    storage.write(begin, wal.piece(begin, wal.end), wal.timeline)
    storage.flush()
    if not crash:
        storage.close()
    return DataDirectory(folder.name, folder)


def damage(place: DataDirectory, name: str, offset: int) -> None:
    path = place.data_dir / "wal" / name
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)


def checked(*places: DataDirectory) -> list[HeldWal]:
    return [check(place, no_progress) for place in places]


def names(place: DataDirectory) -> set[str]:
    return {str(path.relative_to(place.data_dir)) for path in place.data_dir.rglob("*")}


@pytest.fixture
def wal(seed: int) -> Wal:
    return grown(seed)


@pytest.mark.parametrize("crash", [False, True])
def test_whole_and_equal(tmp_path, wal, crash):
    places = [store(tmp_path / str(n), wal, commit=wal.end, crash=crash) for n in range(3)]
    before = [names(place) for place in places]
    found = checked(*places)
    assert [(h.begin_lsn, h.end_lsn, h.records) for h in found] == [
        (MIB, wal.end, len(wal.ends))
    ] * 3
    assert compare(found, no_progress) == (None, wal.end - MIB)
    # It only reads.
    assert [names(place) for place in places] == before


@pytest.mark.parametrize("at", ["record", "page header", "position", "control"])
def test_damage_is_named_and_nothing_is_touched(tmp_path, wal, seed, at):
    place = store(tmp_path / "0", wal, commit=wal.end)
    chance = random.Random(seed)
    name = "000000010000000000000002"
    match at:
        case "record":
            start = chance.choice([s for s in wal.starts if 2 * MIB < s < 3 * MIB - 3000])
            damage(place, name, start + 10 - 2 * MIB)
        case "page header":
            damage(place, name, chance.randrange(1, 100) * 8192 + chance.choice([0, 2, 8]))
        case "position":
            damage(place, "position", 20)
        case "control":
            damage(place, "../control/control", 20)
    before = names(place)
    with pytest.raises(CorruptError) as caught:
        checked(place)
    if at in {"record", "page header"}:
        assert name in caught.value.where
    else:
        assert "damaged" in caught.value.what
    assert names(place) == before


def test_32_segment_switches_after_the_last_known_position(tmp_path, seed):
    """A safekeeper that was killed: complete names say how far it is durable, and damage there is no end."""
    rng = random.Random(seed)
    wal = Wal()
    for segment in range(1, 5):
        wal.fill(segment * MIB + 60_000, rng)
        wal.switch(stale=rng.random() < 0.5)
    wal.fill(5 * MIB + 60_000, rng)
    place = store(tmp_path / "0", wal, commit=wal.end, crash=True)
    (found,) = checked(place)
    assert (found.end_lsn, found.records) == (wal.end, len(wal.ends))
    damage(place, "000000010000000000000003", 50_000)
    with pytest.raises(CorruptError, match="which is durable"):
        checked(place)


def test_a_segment_that_is_gone_or_short_is_named(tmp_path, wal):
    place = store(tmp_path / "0", wal, commit=wal.end)
    short = store(tmp_path / "1", wal, commit=wal.end)
    (place.data_dir / "wal" / "000000010000000000000002").unlink()
    with pytest.raises(CorruptError, match="gone"):
        checked(place)
    path = short.data_dir / "wal" / "000000010000000000000002"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptError, match="bytes, not"):
        checked(short)


def test_a_log_that_begins_inside_a_record(tmp_path, seed):
    wal = grown(seed, 2 * MIB - 50_000)
    wal.record(bytes(300_000))
    wal.fill(3 * MIB, random.Random(seed))
    place = store(tmp_path / "0", wal, commit=wal.end, begin=2 * MIB)
    (found,) = checked(place)
    assert found.records == sum(start >= 2 * MIB for start in wal.starts)


def test_the_first_difference_below_what_is_committed(tmp_path, wal, seed):
    committed = wal.ends[len(wal.ends) // 2]
    other = wal.copy(committed, timeline=1)
    other.fill(wal.end, random.Random(seed + 1), largest=2000)
    places = [
        store(tmp_path / "0", wal, commit=committed),
        store(tmp_path / "1", other, commit=committed - 8),
        store(tmp_path / "2", other, commit=0),
    ]
    found = checked(*places)
    # A tail without a quorum may differ.
    assert compare(found, no_progress) == (None, committed - MIB)
    found[1] = replace(found[1], place=replace(places[1], commit_lsn=other.end))
    difference, compared = compare(found, no_progress)
    assert difference is not None
    first = next(n for n in range(MIB, wal.end) if wal.piece(n, n + 1) != other.piece(n, n + 1))
    assert difference.lsn == first == MIB + compared
    assert set(difference.names) == {"0", "1"}
    assert "differ at" in difference.error().what


def test_what_only_one_holds_is_compared_with_nobody(tmp_path, wal):
    first = store(tmp_path / "0", wal, commit=wal.end)
    second = store(tmp_path / "1", wal, commit=wal.end, begin=3 * MIB)
    assert compare(checked(first, second), no_progress) == (None, wal.end - 3 * MIB)


def test_wal_of_two_clusters(tmp_path, wal):
    places = [store(tmp_path / str(n), wal, commit=wal.end) for n in range(2)]
    found = checked(*places)
    assert found[1].control is not None
    foreign = replace(found[1].control, server=replace(SERVER, system_id=1))
    found[1] = replace(found[1], control=foreign)
    with pytest.raises(DivergedError, match="holds WAL of"):
        compare(found, no_progress)


def test_a_directory_of_somebody_else(tmp_path):
    (tmp_path / "PG_VERSION").write_text("16")
    with pytest.raises(ConfigError, match="PG_VERSION"):
        check(DataDirectory("x", tmp_path), no_progress)
    assert {path.name for path in tmp_path.iterdir()} == {"PG_VERSION"}


def test_a_running_safekeeper_is_looked_at_again(tmp_path, wal):
    place = store(tmp_path / "0", wal, commit=wal.end)
    # What it said was durable has been cut since.
    stale = replace(place, flush_lsn=wal.end + MIB)
    position_file.save(
        FolderDisk(place.data_dir / "wal"), position_file.StoragePosition(MIB, wal.end, exact=True)
    )
    looks = [replace(place, flush_lsn=wal.end)]
    assert check(stale, no_progress, looks.pop).end_lsn == wal.end
    assert not looks
