"""The archive of complete segments: each once, verified, resumable, and it holds the horizon."""

import errno
import random
import threading
from functools import cache

import fsspec
import pytest

from tests.support.wal import MIB, SMALL, Wal
from walsender_bridge.errors import CorruptError, DivergedError, TusklineError, UnavailableError
from walsender_bridge.quorum.protocol.history import History, HistoryEntry
from walsender_bridge.quorum.protocol.messages import ServerInfo
from walsender_bridge.quorum.safekeeper import control_file
from walsender_bridge.quorum.safekeeper.archive import archived_file
from walsender_bridge.quorum.safekeeper.archive import mark as archive_mark
from walsender_bridge.quorum.safekeeper.archive import process as archiver
from walsender_bridge.quorum.safekeeper.archive.upload import Archive
from walsender_bridge.quorum.safekeeper.effects import ControlState
from walsender_bridge.quorum.safekeeper.horizon import horizon
from walsender_bridge.quorum.safekeeper.storage import checksums as segment_sums
from walsender_bridge.quorum.safekeeper.storage.segments import StorageLimits
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage
from walsender_bridge.runtime import record_file
from walsender_bridge.runtime.folder import FolderDisk

MARKS = {archive_mark.NAME}


@cache
def long_wal(seed: int) -> Wal:
    wal = Wal()
    wal.fill(5 * MIB, random.Random(seed), largest=5000)
    return wal


@pytest.fixture
def wal(seed: int) -> Wal:
    return long_wal(seed)


@pytest.fixture
def storage(tmp_path, wal):
    storage = WalStorage(FolderDisk(tmp_path / "wal"), SMALL, StorageLimits(free_bytes=0))
    storage.open()
    storage.reset(MIB)
    storage.write(MIB, wal.piece(MIB, 4 * MIB + 5000), 1)
    storage.flush()
    return storage


def archive(tmp_path, url, node="one", **options):
    own, wal = FolderDisk(tmp_path / f"data-{node}"), FolderDisk(tmp_path / "wal")
    return Archive(own, wal, MIB, str(url), node=node, options=options)


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/archive"
    fsspec.filesystem("memory").store.clear()
    return "memory://archive"


def files(url: str) -> dict[str, bytes]:
    system, folder = fsspec.core.url_to_fs(url)
    found = {path.rsplit("/", 1)[1]: path for path in system.ls(folder, detail=False)}
    return {name: system.cat_file(path) for name, path in found.items() if name not in MARKS}


def test_complete_committed_segments_are_archived_in_order(tmp_path, storage, wal, url):
    one = archive(tmp_path, url)
    assert not one.step(2 * MIB - 8)
    assert one.step(3 * MIB)
    assert one.archived_lsn == 2 * MIB
    assert one.step(3 * MIB)
    # The third is complete, but not committed: it may still be cut off.
    assert not one.step(4 * MIB - 8)
    assert one.step(2**63)
    assert not one.step(2**63)
    assert files(url) == {
        f"00000001000000000000000{n}": wal.piece(n * MIB, (n + 1) * MIB) for n in (1, 2, 3)
    }


def test_it_goes_on_where_it_was_and_another_uploads_nothing_again(
    tmp_path, storage, url, monkeypatch
):
    archive(tmp_path, url).step(4 * MIB)
    again = archive(tmp_path, url)
    assert again.archived_lsn == 2 * MIB
    while again.step(4 * MIB):
        pass
    other = archive(tmp_path, url, node="two")
    monkeypatch.setattr(type(other._files), "mv", None)
    while other.step(4 * MIB):
        pass
    assert other.archived_lsn == 4 * MIB


def test_an_interrupted_upload_is_done_again(tmp_path, storage, url, monkeypatch):
    one = archive(tmp_path, url)
    with monkeypatch.context() as patch:
        patch.setattr(type(one._files), "mv", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(UnavailableError, match=r"could not read the archive: gone"):
            one.step(4 * MIB)
        assert files(url) == {}
        one._files.pipe_file(f"{one._folder}/{archive_mark.NAME}", b'{"archive": "marked"}')
        with pytest.raises(UnavailableError, match=r"could not archive.*: gone"):
            one.step(4 * MIB)
    assert one.archived_lsn == MIB
    assert set(files(url)) == {"000000010000000000000001.one.tmp"}
    assert archive(tmp_path, url).step(4 * MIB)
    assert set(files(url)) == {"000000010000000000000001"}


def test_another_file_of_that_name_is_left_alone(tmp_path, storage, url):
    system, folder = fsspec.core.url_to_fs(url)
    system.makedirs(folder, exist_ok=True)
    system.pipe_file(f"{folder}/000000010000000000000001", b"another cluster's")
    one = archive(tmp_path, url)
    with pytest.raises(DivergedError, match=r"(?s)other content: 17 bytes.*its own archive"):
        one.step(4 * MIB)
    assert files(url) == {"000000010000000000000001": b"another cluster's"}
    assert one.archived_lsn == MIB


def test_10_the_archive_holds_the_horizon(tmp_path, storage, url):
    one = archive(tmp_path, url)
    end = storage.flush_lsn

    def remove() -> int:
        least = horizon(
            restart_lsn=end, commit_lsn=end, flush_lsn=end, archived_lsn=one.archived_lsn
        )
        return storage.remove_below(least)

    assert remove() == 0
    while one.step(4 * MIB):
        pass
    assert remove() >= 2


def test_what_was_removed_before_it_was_archived_is_missing_until_it_is_there(
    tmp_path, storage, wal, url, monkeypatch
):
    one = archive(tmp_path, url)
    with monkeypatch.context() as patch:
        patch.setattr(type(one._files), "mv", lambda *_: (_ for _ in ()).throw(OSError("gone")))
        with pytest.raises(UnavailableError):
            one.step(2**63)
    end = storage.flush_lsn
    kept = horizon(
        restart_lsn=end,
        commit_lsn=end,
        flush_lsn=end,
        archived_lsn=one.archived_lsn,
        max_slot_wal_keep_size=1,
    )
    assert storage.remove_below(kept) >= 2
    begin = storage.begin_lsn
    # Another process finds it out all the same, with no complete segment at hand, and remembers it.
    again = archive(tmp_path, url)
    while again.step(2**63):
        pass
    assert again.missing == ((MIB, begin),)
    assert again.archived_lsn >= begin
    last = archive(tmp_path, url)
    assert last.missing == ((MIB, begin),)
    # Somebody had the second segment, and puts it there.
    system, folder = fsspec.core.url_to_fs(url)
    second = wal.piece(2 * MIB, 3 * MIB)
    system.pipe_file(f"{folder}/000000010000000000000002", second)
    last.rescan()
    assert last.missing == ((MIB, 2 * MIB), (3 * MIB, begin))[: 2 if begin > 3 * MIB else 1]
    system.pipe_file(f"{folder}/000000010000000000000001", wal.piece(MIB, 2 * MIB))
    system.pipe_file(f"{folder}/000000010000000000000003", wal.piece(3 * MIB, 4 * MIB))
    last.rescan()
    assert last.missing == archive(tmp_path, url).missing == ()


def test_a_segment_that_is_removed_while_it_is_archived_is_no_damage(
    tmp_path, storage, url, monkeypatch
):
    one = archive(tmp_path, url)
    segment = tmp_path / "wal" / "000000010000000000000001"
    read, ends = one._wal.read, []

    def overtaken(name: str, offset: int, length: int) -> bytes:
        # It is recycled, and WAL written over it, as the last bytes of the upload are read.
        data = read(name, offset, length) if segment.exists() or name != segment.name else b""
        if name == segment.name and offset + len(data) == MIB:
            ends.append(offset)
            if len(ends) == 3:
                segment.rename(segment.with_name("recycled"))
                return bytes(len(data))
        return data

    monkeypatch.setattr(type(one._wal), "read", lambda _, *where: overtaken(*where))
    with pytest.raises(UnavailableError, match="was removed while it was read"):
        one.step(2**63)
    assert "000000010000000000000001" not in files(url)


def test_histories_come_before_the_segments_of_their_timeline(tmp_path, wal, url, seed):
    point = next(end for end in wal.ends if end > 2 * MIB + 1000)
    other = wal.copy(point, timeline=2)
    other.fill(3 * MIB + 10_000, random.Random(seed))
    storage = WalStorage(FolderDisk(tmp_path / "wal"), SMALL, StorageLimits(free_bytes=0))
    storage.open()
    storage.reset(MIB)
    storage.write(MIB, wal.piece(MIB, point), 1)
    storage.save_history(2, b"1\t0/2000000\tpromoted\n")
    storage.write(point, other.piece(point, other.end), 2)
    storage.flush()
    one = archive(tmp_path, url)
    while one.step(2**63):
        pass
    assert set(files(url)) == {
        "000000010000000000000001",
        "00000002.history",
        "000000020000000000000002",
    }


def test_a_history_without_the_earliest_timelines_gives_way_and_stops_nobody(tmp_path, url) -> None:
    """A safekeeper that was there in time knows more of them than one whose log began later."""
    first, second = b"1\t0/2000000\tpromotion\n", b"2\t0/2000100\tpromotion\n"
    for place, text in ((b"late", second), (b"early", first + second), (b"later", second)):
        wal = tmp_path / place.decode() / "wal"
        wal.mkdir(parents=True)
        (wal / "000000030000000000000002").write_bytes(bytes(MIB))
        (wal / "00000003.history").write_bytes(text)
        disks = FolderDisk(wal.parent / "archived"), FolderDisk(wal)
        assert Archive(*disks, MIB, url, node=place.decode()).step(2**63)
        assert files(url)["00000003.history"] == (second if place == b"late" else first + second)
    (wal / "00000003.history").write_bytes(b"1\t0/2000000\tpromotion\n2\t0/2000200\tpromotion\n")
    (wal.parent / "archived" / "archived").unlink()
    with pytest.raises(DivergedError, match="other content"):
        Archive(*disks, MIB, url, node="other").step(2**63)


def test_an_earlier_version_that_had_archived_nothing_yet_goes_on(tmp_path, storage, url) -> None:
    """It wrote down where its first segment begins, and did not say that nothing was put there."""
    disk = FolderDisk(tmp_path / "data-one")
    begin = min(file.start for file in storage.segments.all())
    archived_file.save(disk, url, archived_file.Archived(begin))
    wal = FolderDisk(tmp_path / "wal")
    with pytest.raises(UnavailableError, match="not the archive"):
        Archive(disk, wal, MIB, url, node="one").step(2**63)  # it may have been removed here since
    assert Archive(disk, wal, MIB, url, node="one", began_lsn=begin).step(2**63)
    assert files(url)


def test_a_lost_memory_is_no_loss(tmp_path, storage, url):
    one = archive(tmp_path, url)
    while one.step(4 * MIB):
        pass
    mark = tmp_path / "data-one" / "archived"
    mark.write_bytes(b"damaged")
    again = archive(tmp_path, url)
    assert again.archived_lsn == 0
    while again.step(4 * MIB):
        pass
    assert again.archived_lsn == 4 * MIB
    assert (tmp_path / "data-one" / "archived.corrupt-1").exists()


def test_the_archiver_leaves_the_control_file_alone(tmp_path):
    """It is the hot loop's: a damaged one is named, and not moved away under that one's eyes."""
    folder = tmp_path / "control"
    folder.mkdir()
    (folder / control_file.NAME).write_bytes(b"TUSKCTRL, damaged")
    with pytest.raises(CorruptError, match="damaged"):
        archiver.run(tmp_path, "memory://archive", threading.Event(), lambda _: None)
    assert [path.name for path in folder.iterdir()] == [control_file.NAME]


def test_40_a_damaged_segment_is_not_archived(tmp_path, storage, wal, url):
    with (tmp_path / "wal" / "000000010000000000000002").open("r+b") as file:
        file.seek(70_000)
        file.write(b"damage")
    one = archive(tmp_path, url)
    assert one.step(2**63)
    with pytest.raises(CorruptError, match="when it was received"):
        one.step(2**63)
    assert set(files(url)) == {"000000010000000000000001"}
    assert one.archived_lsn == 2 * MIB


def test_a_disk_that_is_not_mounted_is_no_archive(tmp_path, storage, wal):
    """The folder below it was made anew, and WAL counted as archived there that was gone once the disk was back."""
    place = tmp_path / "mnt"
    url = f"file://{place}/archive"
    one = archive(tmp_path, url)
    assert one.step(4 * MIB)
    place.rename(tmp_path / "disk")
    for again in (one, archive(tmp_path, url)):
        with pytest.raises(
            UnavailableError, match="not the archive that has the WAL up to 0/200000"
        ):
            again.step(4 * MIB)
        with pytest.raises(UnavailableError, match="not the archive"):
            again.rescan()
    assert not place.exists()
    assert one.archived_lsn == 2 * MIB
    # A safekeeper that has archived nothing marks an archive of its own there, which is another one.
    assert archive(tmp_path, url, node="new").step(4 * MIB)
    (place / "archive" / "000000010000000000000001").unlink()
    with pytest.raises(UnavailableError, match="not the archive"):
        one.step(4 * MIB)
    place.rename(tmp_path / "below")
    (tmp_path / "disk").rename(place)
    assert one.step(4 * MIB)
    assert set(files(url)) == {"000000010000000000000001", "000000010000000000000002"}


def test_an_archive_that_was_emptied_on_purpose_is_begun_again_as_the_error_says(
    tmp_path, storage, url
):
    one = archive(tmp_path, url)
    assert one.step(4 * MIB)
    system, folder = fsspec.core.url_to_fs(url)
    system.rm(folder, recursive=True)
    with pytest.raises(UnavailableError, match="on purpose") as refused:
        one.step(4 * MIB)
    note = tmp_path / "data-one" / archived_file.NAME
    assert str(note) in refused.value.repair
    note.unlink()
    again = archive(tmp_path, url)
    while again.step(2**63):
        pass
    assert len(files(url)) == 3


def test_a_mark_that_is_gone_or_another_ones_is_replaced_while_the_last_segment_is_there(
    tmp_path, storage, url
):
    one = archive(tmp_path, url)
    assert one.step(4 * MIB)
    system, folder = fsspec.core.url_to_fs(url)
    for content in (None, b"{}", b'{"format": 1, "archive": "other"}'):
        if content is None:
            system.rm_file(f"{folder}/{archive_mark.NAME}")
        else:
            system.pipe_file(f"{folder}/{archive_mark.NAME}", content)
        one.rescan()
        assert archive_mark.read(system, folder)
    assert one.step(4 * MIB)
    # From now on it is known by that, wherever the last segment has gone.
    system.rm_file(f"{folder}/000000010000000000000002")
    assert archive(tmp_path, url).step(2**63)


def test_what_an_earlier_version_remembered_is_of_an_archive_that_holds_something(
    tmp_path, storage, url
):
    one = archive(tmp_path, url)
    assert one.step(4 * MIB)
    system, folder = fsspec.core.url_to_fs(url)
    system.rm_file(f"{folder}/{archive_mark.NAME}")
    note = FolderDisk(tmp_path / "data-one")
    record = {"url": str(url), "lsn": 2 * MIB, "missing": []}
    record_file.replace(
        note,
        archived_file.NAME,
        record_file.pack(archived_file.MAGIC, archived_file.FORMAT, record),
    )
    assert archive(tmp_path, url).step(4 * MIB)
    assert archive_mark.read(system, folder)


def test_the_archiver_says_why_it_waits_and_goes_on_by_itself(tmp_path, storage, wal, monkeypatch):
    """A file in the way is moved away, as its error says; the process used to have ended for good by then."""
    control = FolderDisk(tmp_path / "control")
    history = History((HistoryEntry(1, MIB, 1),))
    server = ServerInfo(SMALL.system_id, SMALL.major, MIB)
    control_file.save(control, ControlState(1, server=server, history=history, commit_lsn=2**62))
    monkeypatch.setattr(archiver, "AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(archiver, "FAILED_SECONDS", 0.05)
    place = tmp_path / "archive"
    place.mkdir()
    wrong = place / "000000010000000000000002"
    wrong.write_bytes(b"half of it")
    stop, told = threading.Event(), []

    def tell(error: TusklineError | None) -> None:
        told.append(error)
        if error is not None:
            assert "other content: 10 bytes" in error.what
            wrong.rename(tmp_path / "moved away")
        if len(files(place.as_uri())) == 3:
            stop.set()

    archiver.run(tmp_path, place.as_uri(), stop, tell)
    assert [error is None for error in told].count(False) == 1
    assert told[-1] is None


def test_nothing_is_left_of_an_upload_for_which_there_was_no_room(tmp_path, storage, monkeypatch):
    url = f"file://{tmp_path}/archive"
    one = archive(tmp_path, url)
    full = OSError(errno.ENOSPC, "No space left on device")
    reads = iter([*range(3)])

    def pieces(name: str):
        number = next(reads)
        yield bytes(1000)
        if number:
            raise full

    with monkeypatch.context() as patch:
        patch.setattr(one, "_pieces", pieces)
        patch.setattr(segment_sums, "read", lambda _: {})
        with pytest.raises(UnavailableError, match="No space left"):
            one.step(4 * MIB)
    assert files(url) == {}
