"""Damage that a log server's writes meet: it is told from a full disk, and no log server crashes or fails by it for ever."""

import faulthandler
import os
import random
import select
import shutil
import signal
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import lmdb
import pytest

from tests.support import stored_log
from tests.support.log_entries import SCHEMAS, EntryMaker, batches
from walsender_bridge.change_log.protocol import MAX_COUNT, CommitContext, IssuedCommit
from walsender_bridge.change_log.replica import fatal_segments
from walsender_bridge.change_log.replica.disk import RecoveryOutcome
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.storage import pages
from walsender_bridge.change_log.storage.segment import Segment
from walsender_bridge.errors import CorruptError, NotSupportedError, TusklineError, UnavailableError

PAGE = 4096
#: In a head: where the tree of free pages begins.
FREE_ROOT = 80
#: Of a page: behind its number and a gap, its kind.
KIND = 10
BRANCH, LEAF = 1, 2
#: Lives of a log server after which nothing may be left that it does not know.
LIVES = 4


@dataclass(frozen=True)
class Pages:
    """Pages of a segment's file, by what they are."""

    heads: list[int]
    free: list[int]
    branches: list[int]
    leaves: list[int]


def pages_of(file: Path) -> Pages:
    content = file.read_bytes()
    newer = pages.check_heads(file).transaction % 2
    (free,) = struct.unpack_from("=Q", content, newer * PAGE + FREE_ROOT)
    kinds = {at: content[at * PAGE + KIND] for at in range(2, len(content) // PAGE)}
    numbered = [at for at in kinds if struct.unpack_from("=Q", content, at * PAGE)[0] == at]
    by = {kind: [at for at in numbered if kinds[at] == kind] for kind in (BRANCH, LEAF)}
    return Pages([0, 1], [free], by[BRANCH], by[LEAF])


def append(replica: HostedReplica, sizes: list[int]) -> None:
    """Commits of one entry each, by a new writer."""
    status = replica.status()
    make = EntryMaker()
    make.follow(status)
    session, _ = replica.open_writer(status.term + 1)
    for size in sizes:
        replica.append(session, [make.whole(size=size)], list(SCHEMAS.values()), None, 2**64 - 1)
        status = replica.status()
        end = status.committed_end
        replica.commit([IssuedCommit(CommitContext(status.version + 1, end, end, 1))], 1)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of streams of a log server with one, `shop`, whose segment has inner pages and a free list."""
    streams = tmp_path_factory.mktemp("written") / "streams"
    replica = HostedReplica(streams / "shop")
    replica.create("shop", "log")
    append(replica, [[60, 400, 3000, 9000][at % 4] for at in range(150)])
    replica.close()
    file = next(streams.glob("shop/segment-*/data.mdb"))
    assert pages_of(file).branches
    return streams


def damage(file: Path, page: int, choose: random.Random) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(choose.choice([1, 1, 2, 8])):
        at = choose.choice([choose.randrange(PAGE), choose.randrange(160), choose.randrange(32)])
        content[page * PAGE + at] ^= choose.choice(
            [1 << choose.randrange(8), choose.randrange(1, 256)]
        )
    file.write_bytes(content)


def live(streams: Path, after: signal.Signals | None) -> str:
    """What a log server does after such an end of the one before it; why it cannot go on, if it knows."""
    if after in fatal_segments.SIGNALS:
        fatal_segments.keep_fatal_aside(streams)
    elif after is not None:
        fatal_segments.keep_newest_aside(streams)
    replica = HostedReplica(streams / "shop")
    replica.recover()
    outcome, reason = replica.outcome
    if outcome == RecoveryOutcome.INVALID:
        return f"named: {reason}"
    append(replica, [60, 3000, 9000, 60, 60000, 60] * 2)
    replica.trim(100, 2**62)
    status = replica.status()
    for _ in batches(replica, status.low_offset, status.committed_end):
        pass
    replica.close()
    return "well"


def live_in_child(streams: Path, after: signal.Signals | None) -> tuple[str, signal.Signals | None]:
    """What came of it, and the signal that ended it."""
    end, beginning = os.pipe()
    child = os.fork()
    if not child:
        faulthandler.disable()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        result = "a fault of ours"
        try:
            result = live(streams, after)
        except NotSupportedError as error:
            result = f"named: {error}"
        except BaseException as error:
            result = f"error: {type(error).__name__}: {error}"
        os.write(beginning, result.encode()[:4000])
        os._exit(0)
    os.close(beginning)
    with os.fdopen(end, "rb") as opened:
        if not select.select([opened], [], [], 60)[0]:
            os.kill(child, signal.SIGKILL)
        result = opened.read().decode()
    ended = os.WTERMSIG(os.waitpid(child, 0)[1])
    return result, signal.Signals(ended) if ended else None


def check_no_loop(written: Path, folder: Path, seed: int) -> None:
    """Damage pages, and let log servers live one after the other until one is well, or says why not."""
    choose = random.Random(seed)
    shutil.copytree(written, folder)
    file = next(folder.glob("shop/segment-*/data.mdb"))
    kinds = pages_of(file)
    kind = choose.choice(["heads", "free", "branches", "leaves"])
    damage(file, choose.choice(getattr(kinds, kind)), choose)
    lives: list[str] = []
    after = None
    for _ in range(LIVES):
        result, after = live_in_child(folder, after)
        lives.append(after.name if after else result)
        if lives[-1] == "well" or lives[-1].startswith("named"):
            break
    else:
        pytest.fail(f"seed {seed}, {kind}: {lives}")
    shutil.rmtree(folder)


def test_no_damaged_page_has_a_log_server_crash_or_fail_for_ever(
    written: Path, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    for at in range(12):
        check_no_loop(written, tmp_path / "damaged", seed + at)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_no_damaged_page_of_a_thousand_has_a_log_server_fail_for_ever(
    written: Path, tmp_path: Path
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    for at in range(1000):
        check_no_loop(written, tmp_path / "damaged", seed + at)


# -- one page ---------------------------------------------------------------------------------------


@pytest.fixture
def damaged(written: Path, tmp_path: Path) -> Path:
    """A log server's data directory whose stream's free list begins with a page of another kind: readers do not meet it."""
    data_dir = stored_log.make(tmp_path / "log-server", stream="other")
    shutil.copytree(written / "shop", data_dir / "streams" / "shop")
    file = next(data_dir.glob("streams/shop/segment-*/data.mdb"))
    content = bytearray(file.read_bytes())
    content[pages_of(file).free[0] * PAGE + KIND] = BRANCH
    file.write_bytes(content)
    return data_dir


@pytest.fixture
def server(damaged: Path) -> Iterator[Callable[[], ReplicaServer]]:
    """Starts the log server."""
    running: list[ReplicaServer] = []

    def start() -> ReplicaServer:
        stop()
        running.append(ReplicaServer(damaged, "127.0.0.1:0"))
        return running[0]

    def stop() -> None:
        while running:
            running.pop().stop()

    yield start
    stop()


def test_a_write_that_meets_damage_names_the_segment_and_no_full_disk(
    damaged: Path, server: Callable[[], ReplicaServer]
) -> None:
    replica = server().replica("shop")
    assert replica.outcome == (RecoveryOutcome.VALID, "")
    with pytest.raises(CorruptError, match=r"damaged page: page \d+: .*renamed") as caught:
        append(replica, [60] * 20)
    assert "data.mdb" in caught.value.where
    assert "full disk" not in str(caught.value)
    outcome, reason = replica.outcome
    assert outcome == RecoveryOutcome.INVALID
    assert "damaged page" in reason
    assert replica.report("k") is None
    names = [path.name for path in (damaged / "streams" / "shop").iterdir()]
    assert names == ["segment-00000000000000000001.corrupt-1"]


def test_after_an_end_that_was_not_clean_the_newest_segments_are_checked_before_they_are_opened(
    damaged: Path, server: Callable[[], ReplicaServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server().replica("shop").outcome[0] == RecoveryOutcome.VALID
    assert (damaged / "running").exists()
    # One that ended well before.
    assert server().replica("shop").outcome[0] == RecoveryOutcome.VALID
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    second = server()
    monkeypatch.undo()
    assert second.replica("shop").outcome[0] == RecoveryOutcome.INVALID
    assert "damaged page" in second.replica("shop").outcome[1]
    assert second.replica("other").outcome[0] == RecoveryOutcome.VALID


def test_a_damaged_segment_is_replaced_from_another_replica(
    written: Path, damaged: Path, server: Callable[[], ReplicaServer], tmp_path: Path
) -> None:
    shutil.copytree(written / "shop", tmp_path / "healthy" / "shop")
    source = HostedReplica(tmp_path / "healthy" / "shop")
    source.recover()
    replica = server().replica("shop")
    with pytest.raises(CorruptError, match="renamed"):
        append(replica, [60] * 20)
    source.seal(source.status().committed_end, source.status().term + 1, MAX_COUNT)
    offer = source.sync_offer("a")
    lacking = replica.sync_init(offer, "log")
    for batch in source.sync_batches(offer, lacking):
        replica.sync_replicate("a", batch)
    end = source.status().committed_end
    assert [*batches(replica, 1, end)] == [*batches(source, 1, end)]
    (kept,) = (damaged / "streams" / "shop").glob("*.replaced-*")
    assert (kept / "data.mdb").stat().st_size > 0
    source.close()


@pytest.mark.parametrize(
    ("error", "what", "kept"),
    [
        (lmdb.DiskError("mdb_put: No space left on device"), "the disk is full", False),
        (lmdb.MapFullError("mdb_put: MDB_MAP_FULL"), "the disk is full", False),
        (lmdb.Error("mdb_put: Input/output error"), "whether the disk works", False),
        (lmdb.CorruptedError("mdb_put: MDB_CORRUPTED"), "LMDB could not write it", True),
    ],
)
def test_damage_is_told_from_a_full_disk(
    written: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: lmdb.Error,
    what: str,
    kept: bool,
) -> None:
    shutil.copytree(written / "shop", tmp_path / "shop")
    replica = HostedReplica(tmp_path / "shop")
    replica.recover()

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "write", fail)
        with pytest.raises(TusklineError, match=what) as caught:
            append(replica, [60])
    assert isinstance(caught.value, CorruptError if kept else UnavailableError)
    assert bool([*(tmp_path / "shop").glob("*.corrupt-*")]) is kept
    if not kept:
        append(replica, [60])
    replica.close()
