"""A full disk under a replica, at each kind of write: named, nothing is lost, and it goes on when there is room."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.log_entries import SCHEMAS, EntryMaker, batches
from tests.support.small_disk import fill, mounted
from walsender_bridge.change_log.protocol import MAX_COUNT, CommitContext, IssuedCommit
from walsender_bridge.change_log.replica.disk import RecoveryOutcome
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.errors import UnavailableError
from walsender_bridge.runtime import disk_full

SEGMENT_BYTES = 300_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    with mounted(folder, "-o", "size=3m"):
        yield folder


class Log:
    """A replica with a writer and a repository of its own. `acknowledged`: its entries."""

    def __init__(self, folder: Path) -> None:
        self.replica = HostedReplica(folder, segment_bytes=SEGMENT_BYTES)
        self.replica.create("s", "log")
        self.acknowledged: list[bytes] = []
        self.take_over()

    def take_over(self) -> None:
        status = self.replica.status()
        self.make = EntryMaker(seed=len(self.acknowledged))
        self.make.follow(status)
        self.session, _ = self.replica.open_writer(status.term + 1)

    def append(self, size: int) -> None:
        entry = self.make.whole(size=size)
        self.replica.append(self.session, [entry], list(SCHEMAS.values()), None, 2**64 - 1)
        self.acknowledged.append(entry)

    def commit(self) -> None:
        status = self.replica.status()
        begin = status.committed_end
        context = CommitContext(status.version + 1, begin, begin, status.end_offset - begin)
        self.replica.commit([IssuedCommit(context)], 1)

    def reopen(self) -> None:
        self.replica.close()
        self.replica = HostedReplica(self.replica.folder, segment_bytes=SEGMENT_BYTES)
        self.replica.recover()

    def check(self) -> None:
        """All that was acknowledged is there, from the low watermark on, once it is committed."""
        self.commit()
        status = self.replica.status()
        found = batches(self.replica, status.low_offset, status.committed_end)
        assert [e.data for batch in found for e in batch] == self.acknowledged[
            status.low_offset - 1 :
        ]


@pytest.mark.parametrize("size", [3000, 20_000, 150_000])
def test_a_log_that_fills_its_disk_says_so_and_goes_on_behind_a_trim(disk: Path, size: int) -> None:
    """Whatever the write was that met it: of an entry, of a commit, or of a new segment."""
    if size < SEGMENT_BYTES // 50:
        (disk / "ballast").write_bytes(bytes(2 << 20))
    log = Log(disk / "s")
    for _ in range(3):
        with pytest.raises(UnavailableError, match="the disk is full") as caught:  # noqa: PT012
            while True:
                log.append(size)
                log.commit()
        assert caught.value.repair == "free disk space there; nothing is lost"
        log.reopen()
        assert log.replica.outcome == (RecoveryOutcome.VALID, "")
        end = log.replica.status().committed_end
        log.replica.trim(end - 2, 2**62)
        log.take_over()
        log.append(size)
        log.check()
    log.replica.close()


def synchronized(source: HostedReplica, to: HostedReplica) -> None:
    offer = source.sync_offer("a")
    for batch in source.sync_batches(offer, to.sync_init(offer, "log")):
        to.sync_replicate("a", batch)


def test_a_synchronization_onto_a_full_disk_says_so_and_is_resumed(
    disk: Path, tmp_path: Path
) -> None:
    log = Log(tmp_path / "s")
    for _ in range(30):
        log.append(20_000)
        log.commit()
    source = log.replica
    source.seal(source.status().committed_end, source.status().term + 1, MAX_COUNT)
    to = HostedReplica(disk / "s", segment_bytes=SEGMENT_BYTES)
    to.learn("log")
    ballast = disk / "ballast"
    for room in (0, 90_000, 200_000, 400_000):
        ballast.unlink(missing_ok=True)
        fill(ballast)
        os.truncate(ballast, ballast.stat().st_size - room)
        with pytest.raises(UnavailableError, match="the disk is full"):
            synchronized(source, to)
        assert to.report("k") is None
        to.close()
        to = HostedReplica(disk / "s", segment_bytes=SEGMENT_BYTES)
        to.learn("log")
        to.recover()
    ballast.unlink()
    synchronized(source, to)
    end = source.status().committed_end
    assert [*batches(to, 1, end)] == [*batches(source, 1, end)]
    to.close()
    source.close()


def test_a_segment_that_is_made_on_a_full_disk_ends_no_process(disk: Path) -> None:
    """LMDB writes its table of readers through a memory map: without room for it, SIGBUS ended the log server."""
    fill(disk / "ballast")
    (disk / "s").mkdir()
    child = os.fork()
    if not child:
        code = 1
        try:
            HostedReplica(disk / "s").create("s", "log")
        except UnavailableError as error:
            code = 0 if "the disk is full" in error.what else 2
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFSIGNALED(status), signal.Signals(os.WTERMSIG(status)).name
    assert os.WEXITSTATUS(status) == 0


def test_a_write_of_which_a_part_found_room_is_a_full_disk(disk: Path) -> None:
    log = Log(disk / "s")
    log.append(3000)
    ballast = disk / "ballast"
    fill(ballast)
    os.truncate(ballast, ballast.stat().st_size - 40_960)
    assert disk_full.of_folder(disk) is not None
    with pytest.raises(UnavailableError, match="the disk is full"):
        log.append(400_000)
    ballast.unlink()
    log.take_over()
    log.append(400_000)
    log.check()
    log.replica.close()
