"""What the WAL server shares and keeps: the page of positions, the folder's files, the slots."""

import json
import multiprocessing
import os
import select
import shutil
import time
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

from walsender_bridge.errors import CorruptError, NotSupportedError
from walsender_bridge.postgres.protocol.backend import SqlErrorReply
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.postgres.protocol.replication import ServerTimelines
from walsender_bridge.postgres.protocol.wal_page import segment_name
from walsender_bridge.quorum.protocol import shared_page
from walsender_bridge.quorum.protocol.history import History, HistoryEntry
from walsender_bridge.quorum.protocol.messages import HotStandbyFeedback
from walsender_bridge.quorum.protocol.positions import Positions, Readers
from walsender_bridge.quorum.protocol.shared_page import PositionReader, PositionWriter
from walsender_bridge.quorum.safekeeper.effects import ControlState
from walsender_bridge.quorum.safekeeper.reader_page import ReaderPage
from walsender_bridge.quorum.wal_server.slot_file import SlotFile
from walsender_bridge.quorum.wal_server.slots import MOST_SLOTS, Slots, WalServerSlot
from walsender_bridge.quorum.wal_server.wal_folder import PARTIAL, WalCursor, WalFolder
from walsender_bridge.runtime import checksummed_json, shared_files

MIB = 1 << 20


def made(lsn: int, timeline: int = 1) -> Positions:
    return Positions(2**63 + 7, 16, MIB, ServerTimelines(timeline), lsn, lsn * 3)


# -- the page ---------------------------------------------------------------------------------------


def test_both_sides_see_what_the_other_wrote_whoever_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "positions"
    with PositionReader(path, ServerTimelines) as reader, PositionWriter(path) as writer:
        assert reader.now() is None
        assert writer.readers() is None
        for lsn in (5, 6, 2, 9):
            writer.publish(made(lsn))
            assert reader.now() == made(lsn)
        needs = Readers(77, HotStandbyFeedback(1, 2, 3, 4), 5)
        reader.publish(needs)
        assert writer.readers() == needs
        reader.publish(Readers())
        assert writer.readers() == Readers()
    # Another life of either goes on from there, not from an older record.
    with PositionReader(path, ServerTimelines) as reader, PositionWriter(path) as writer:
        assert reader.now() == made(9)
        writer.publish(made(10, timeline=4))
        assert reader.now() == made(10, timeline=4)


def test_a_record_that_is_torn_anywhere_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "positions"
    with PositionReader(path, ServerTimelines) as reader, PositionWriter(path) as writer:
        writer.publish(made(100))
        before = path.read_bytes()
        writer.publish(made(200))
        after = path.read_bytes()
        changed = [i for i in range(len(after)) if before[i] != after[i]]
        assert changed
        for cut in changed[1:]:
            # The writer dies when it has written all below `cut`, whatever the order of its stores was.
            for torn in (after[:cut] + before[cut:], before[:cut] + after[cut:]):
                _overwrite(path, torn)
                assert reader.now() in {made(100), made(200)}
        _overwrite(path, after)
        assert reader.now() == made(200)


def test_positions_are_never_read_backwards(tmp_path: Path) -> None:
    path = tmp_path / "positions"
    with PositionReader(path, ServerTimelines) as reader, PositionWriter(path) as writer:
        writer.publish(made(100))
        before = path.read_bytes()
        writer.publish(made(200))
        assert reader.now() == made(200)
        # The newer record is being replaced, and the older one still stands.
        last = max(i for i, byte in enumerate(path.read_bytes()) if byte != before[i])
        torn = bytearray(path.read_bytes())
        torn[last] ^= 1
        _overwrite(path, bytes(torn))
        assert reader.now() == made(200)
        writer.publish(made(300))
        assert reader.now() == made(300)


def _overwrite(path: Path, data: bytes) -> None:
    # In place: the mapping is of this file.
    with path.open("r+b") as file:
        file.write(data)


def _write_many(path: str, enough: Event) -> None:
    lsn = 0
    with PositionWriter(Path(path)) as writer:
        while not enough.is_set():
            for _ in range(100):
                lsn += 1
                writer.publish(made(lsn))


def test_a_reader_never_sees_half_a_record_of_a_writer_that_does_not_stop(tmp_path: Path) -> None:
    path = tmp_path / "positions"
    context = multiprocessing.get_context("spawn")
    enough = context.Event()
    process = context.Process(target=_write_many, args=(str(path), enough), daemon=True)
    with PositionReader(path, ServerTimelines) as reader:
        process.start()
        seen, last, end = 0, 0, time.monotonic() + 60
        try:
            # On a busy machine the two seldom run at the same time, and 1.5 s are not enough.
            while process.is_alive() and (time.monotonic() < end or seen <= 100):
                found = reader.now()
                if found is not None:
                    end = min(end, time.monotonic() + 1.5)
                    assert found.commit_lsn == 3 * found.flush_lsn
                    assert found.flush_lsn >= last
                    seen += found.flush_lsn > last
                    last = found.flush_lsn
        finally:
            enough.set()
            process.join()
    print(f"{seen} different records seen of {last}")
    assert process.exitcode == 0
    assert seen > 100


def test_a_reader_that_waits_is_woken_and_one_that_does_not_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "positions"
    with PositionReader(path, ServerTimelines) as reader, PositionWriter(path) as writer:
        poll = select.poll()
        poll.register(reader.fileno(), select.POLLIN)
        writer.publish(made(1))
        assert not poll.poll(0)
        reader.arm()
        writer.publish(made(2))
        assert poll.poll(1000)
        reader.drain()
        writer.publish(made(3))
        assert not poll.poll(0)


@pytest.mark.parametrize("everything", [True, False], ids=["both", "pipe"])
def test_a_page_that_is_removed_is_made_again_and_both_ends_go_over_to_it(
    tmp_path: Path, everything: bool
) -> None:
    path = tmp_path / "positions"
    needs = Readers(77, HotStandbyFeedback(1, 2, 3, 4), 5)
    with PositionReader(path, ServerTimelines) as reader, PositionWriter(path) as writer:
        writer.publish(made(1))
        reader.publish(needs)
        assert (writer.is_removed(), reader.is_replaced()) == (False, False)
        path.with_name("positions.wake").unlink()
        if everything:
            path.unlink()
        # Both are there still, and tell each other what there is.
        assert (writer.is_removed(), reader.is_replaced()) == (True, False)
        assert writer.readers() == needs
        writer.publish(made(2))
        assert reader.now() == made(2)
        with PositionWriter(path) as again:
            again.publish(made(3))
            assert (again.is_removed(), reader.is_replaced()) == (False, True)
            with PositionReader(path, ServerTimelines) as after:
                assert after.now() == made(3)
                assert not after.is_replaced()
                after.publish(needs)
                assert again.readers() == needs
                poll = select.poll()
                poll.register(after.fileno(), select.POLLIN)
                after.arm()
                again.publish(made(4))
                assert poll.poll(1000)


def test_a_hot_loop_goes_on_without_a_page_and_has_one_once_it_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_files, "_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    folder = shared_files.prepare(tmp_path / "run")
    with ReaderPage(folder / "positions-1") as page:
        page.tell(ControlState(1, history=History((HistoryEntry(1, 1, 1),))), 5, 5)
        page.readers()
        shutil.rmtree(folder.resolve())
        (tmp_path / "run").rename(tmp_path / "away")
        assert page.readers() is None
        (tmp_path / "away").rename(tmp_path / "run")
        assert page.readers() is None
        made = folder.resolve()
        assert (made.parent, made.stat().st_mode & 0o777) == (tmp_path / "shm", 0o700)
        with PositionReader(folder / "positions-1", ServerTimelines) as reader:
            found = reader.now()
            assert found is not None
            assert found.flush_lsn == 5
            reader.publish(Readers(3))
            assert page.readers() == Readers(3)


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "positions"
    path.write_bytes(b"tuskline pos 002" + bytes(shared_page._SIZE - 16))
    with pytest.raises(CorruptError, match="another version"):
        PositionWriter(path)


# -- the folder -------------------------------------------------------------------------------------


class Folder:
    """Segments whose every byte tells its timeline."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cursor = WalCursor(WalFolder(path), MIB)

    def segment(self, timeline: int, number: int, *, partial: bool = False) -> Path:
        name = segment_name(timeline, number * MIB, MIB) + (PARTIAL if partial else "")
        (self.path / name).write_bytes(bytes([timeline]) * MIB)
        return self.path / name

    def read(self, lsn: int, size: int, timeline: int, history: ServerTimelines) -> bytes:
        buffer = bytearray(size)
        got = self.cursor.read_into(memoryview(buffer), lsn, size, timeline, history)
        return bytes(buffer[:got])


@pytest.fixture
def folder(tmp_path: Path):
    made = Folder(tmp_path)
    yield made
    made.cursor.close()


def test_a_chunk_ends_with_its_segment_and_with_its_timeline(folder: Folder) -> None:
    for number in (1, 2, 3):
        folder.segment(1, number)
    fork = 2 * MIB + 5000
    history = ServerTimelines(2, (WalPosition(1, fork),))
    assert folder.read(2 * MIB - 10, 100, 1, history) == b"\1" * 10
    # The newer timeline has no file yet: the older one's counts as far as it belongs to both.
    assert folder.read(fork - 10, 100, 1, history) == b"\1" * 10
    with pytest.raises(SqlErrorReply, match="already been removed"):
        folder.read(fork, 100, 2, history)
    folder.segment(2, 2, partial=True)
    assert folder.read(fork, 100, 2, history) == b"\2" * 100
    # And preferred for the whole segment once it is there.
    assert folder.read(2 * MIB, 100, 1, history) == b"\2" * 100
    assert folder.read(MIB, 100, 1, history) == b"\1" * 100
    with pytest.raises(SqlErrorReply, match="000000020000000000000003"):
        folder.read(3 * MIB, 100, 2, history)


def test_a_segment_that_becomes_complete_is_read_on(folder: Folder) -> None:
    partial = folder.segment(1, 1, partial=True)
    history = ServerTimelines(1)
    assert folder.read(MIB, 10, 1, history) == b"\1" * 10
    partial.rename(partial.with_suffix(""))
    assert folder.read(MIB + 10, 10, 1, history) == b"\1" * 10


@pytest.mark.parametrize("checks", range(3))
def test_a_segment_that_becomes_complete_between_two_checks_is_no_removed_one(
    folder: Folder, monkeypatch: pytest.MonkeyPatch, checks: int
) -> None:
    """Its suffix goes after so many of the checks whether the file that was read has its name."""
    partial = folder.segment(1, 1, partial=True)
    assert folder.read(MIB, 8, 1, ServerTimelines(1)) == b"\1" * 8
    real, done = Path.stat, 0

    def complete_in_time() -> None:
        if done == checks:
            partial.rename(partial.with_suffix(""))

    def checked(path: Path) -> os.stat_result:
        nonlocal done
        try:
            return real(path)
        finally:
            done += 1
            complete_in_time()

    complete_in_time()
    monkeypatch.setattr(Path, "stat", checked)
    assert folder.read(MIB + 8, 8, 1, ServerTimelines(1)) == b"\1" * 8
    monkeypatch.undo()


@pytest.mark.parametrize("how", ["removed", "recycled"])
def test_bytes_of_a_segment_that_lost_its_name_are_not_handed_out(folder: Folder, how: str) -> None:
    segment = folder.segment(1, 1)
    history = ServerTimelines(1)
    assert folder.read(MIB, 10, 1, history)
    if how == "removed":
        segment.unlink()
    else:
        segment.rename(folder.path / (segment_name(1, 9 * MIB, MIB) + PARTIAL))
    with pytest.raises(SqlErrorReply, match="already been removed"):
        folder.read(MIB + 10, 10, 1, history)


def test_a_history_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = WalFolder(tmp_path)
    assert folder.history(1) == ServerTimelines(1)
    with pytest.raises(CorruptError, match="timeline 3 is missing"):
        folder.history(3)
    (tmp_path / "00000003.history").write_text("1\t0/500\tno recovery target\n2\t0/900\twhy\n")
    assert folder.history(3) == ServerTimelines(3, (WalPosition(1, 0x500), WalPosition(2, 0x900)))


# -- slots ------------------------------------------------------------------------------------------


def test_what_is_pinned_is_what_the_file_says(tmp_path: Path) -> None:
    file = SlotFile(tmp_path / "slots")
    slots = Slots(MIB)
    assert slots.pin_lsn() is None
    slots.create(WalServerSlot("a", 10 * MIB), 1)
    assert slots.pin_lsn() is None  # not yet durable, so not yet promised
    file.save(slots.durable())
    slots.saved(slots.durable())
    assert slots.pin_lsn() == 10 * MIB
    slots.acquire("a", 2)
    slots.confirm("a", 10 * MIB + 5)
    assert (slots.changed, slots.frees_a_segment) == (True, False)
    slots.confirm("a", 12 * MIB)
    slots.confirm("a", 11 * MIB)  # never back
    assert (slots.changed, slots.frees_a_segment) == (True, True)
    # A crash now would bring the older position back: it is the one that is pinned.
    assert slots.pin_lsn() == 10 * MIB
    assert Slots.restored(file.load(), MIB).pin_lsn() == 10 * MIB
    file.save(slots.durable())
    slots.saved(slots.durable())
    assert slots.pin_lsn() == 12 * MIB
    assert Slots.restored(file.load(), MIB).find("a") == WalServerSlot("a", 12 * MIB)


def test_temporary_slots_pin_and_end_with_their_connection() -> None:
    slots = Slots(MIB)
    slots.create(WalServerSlot("passing", 5, temporary=True), 1)
    assert slots.pin_lsn() == 5
    assert slots.durable() == {}
    with pytest.raises(SqlErrorReply, match="is active"):
        slots.acquire("passing", 2)
    slots.acquire("passing", 1)
    slots.release("passing")
    with pytest.raises(SqlErrorReply, match="is active"):
        slots.drop("passing", 2)
    slots.disconnected(1)
    assert slots.find("passing") is None


def test_a_slot_remembers_its_readers_oldest_transaction(tmp_path: Path) -> None:
    slots = Slots(MIB)
    slots.create(WalServerSlot("a"), 1)
    slots.acquire("a", 1)
    slots.heed("a", HotStandbyFeedback(700, 1, 0, 0))
    slots.disconnected(1)
    file = SlotFile(tmp_path / "slots")
    file.save(slots.durable())
    assert list(Slots.restored(file.load(), MIB).feedbacks()) == [HotStandbyFeedback(700, 1, 0, 0)]
    assert slots.pin_lsn() is None
    for number in range(MOST_SLOTS - 1):
        slots.create(WalServerSlot(f"s{number}"), 1)
    with pytest.raises(SqlErrorReply, match="all replication slots are in use"):
        slots.create(WalServerSlot("more"), 1)


def test_a_slot_whose_wal_was_removed_is_lost_and_holds_nothing(tmp_path: Path) -> None:
    slots, file = Slots(MIB), SlotFile(tmp_path / "slots")
    slots.create(WalServerSlot("a", 3 * MIB + 5, HotStandbyFeedback(700, 1, 0, 0)), 1)
    slots.create(WalServerSlot("b", 5 * MIB), 1)
    slots.create(WalServerSlot("idle"), 1)
    slots.acquire("a", 2)
    folder = WalFolder(tmp_path)
    for number in (4, 5, 6):
        (tmp_path / (segment_name(1, number * MIB, MIB) + (PARTIAL if number == 6 else ""))).touch()

    def look(served: int = 6 * MIB) -> list[str]:
        holds = partial(folder.holds, segment_bytes=MIB, history=ServerTimelines(1))
        return [slot.name for slot in slots.lose(served, holds)]

    # The next segment may not be there yet when all is confirmed; and once is an accident.
    assert look(3 * MIB + 5) == look(3 * MIB + 5) == []
    assert look() == []
    assert look() == ["a"]
    assert look() == []
    with pytest.raises(SqlErrorReply, match='can no longer access replication slot "a"'):
        slots.check("a", fatal=True)
    slots.confirm("a", 6 * MIB)
    slots.heed("a", HotStandbyFeedback(700, 1, 0, 0))
    slots.disconnected(2)
    with pytest.raises(SqlErrorReply) as caught:
        slots.acquire("a", 2)
    assert caught.value.error.detail == (
        'This replication slot has been invalidated due to "wal_removed".'
    )
    file.save(slots.durable())
    slots.saved(slots.durable())
    for each in (slots, Slots.restored(file.load(), MIB)):
        assert each.pin_lsn() == 5 * MIB
        assert list(each.feedbacks()) == [HotStandbyFeedback()] * 3
        words = [slot.wal_status(5 * MIB + 1) for slot, _ in each.all()]
        assert words == ["lost", "unreserved", None]
        assert each.all()[1][0].wal_status(5 * MIB) == "reserved"
    assert slots.drop("a", 2)


def test_a_slot_file_that_is_damaged_anywhere_is_refused(tmp_path: Path) -> None:
    file = SlotFile(tmp_path / "slots")
    file.save({"a": WalServerSlot("a", 3 * MIB)})
    whole = file.path.read_bytes()
    for at, byte in enumerate(whole):
        raw = whole[:at] + bytes([byte ^ 1]) + whole[at + 1 :]
        file.path.write_bytes(raw)
        with pytest.raises(CorruptError) as caught:
            file.load()
        assert caught.value.where == str(file.path)
        assert file.path.read_bytes() == raw


def test_a_slot_file_of_a_newer_version_is_refused_by_name(tmp_path: Path) -> None:
    file = SlotFile(tmp_path / "slots")
    checksummed_json.save(file.path, {"format": 3, "slots": []})
    with pytest.raises(NotSupportedError, match="unsupported format 3 of the replication slots"):
        file.load()
    assert file.path.exists()


def test_the_slot_file_is_plain_text_of_its_owner(tmp_path: Path) -> None:
    file = SlotFile(tmp_path / "slots")
    file.save({"a": WalServerSlot("a", 3)})
    assert file.path.stat().st_mode & 0o077 == 0
    assert json.loads(file.path.read_bytes())["slots"][0]["name"] == "a"
    assert list(tmp_path.iterdir()) == [file.path]
