"""The check of an LMDB file page by page: what LMDB writes passes, and damage that only a writer would meet is found."""

import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tests.support.log_entries import SCHEMAS, EntryMaker, batches
from walsender_bridge.change_log.protocol import CommitContext, IssuedCommit
from walsender_bridge.change_log.replica.disk import RecoveryOutcome
from walsender_bridge.change_log.replica.host import HostedReplica
from walsender_bridge.change_log.storage import pages
from walsender_bridge.errors import CorruptError

PAGE = 4096
#: In a head: behind the page's header of 16 bytes.
VERSION, PAGE_SIZE, MAIN_DEPTH, MAIN_ROWS, MAIN_ROOT = 20, 40, 94, 120, 128
LAST_PAGE, TRANSACTION = 136, 144


def random_writes(folder: Path, choose: random.Random) -> Iterator[Path]:
    """An LMDB file after each of some transactions that put and delete values of any size."""
    with lmdb.open(str(folder), map_size=1 << 30, max_dbs=3, meminit=False) as env:
        databases = [env.open_db(name) for name in (b"a", b"b", b"c")]
        for _ in range(25):
            with env.begin(write=True) as transaction:
                for _ in range(choose.choice([1, 5, 150])):
                    database = choose.choice(databases)
                    key = choose.randrange(1000).to_bytes(8, "big")
                    if choose.random() < 0.6:
                        size = choose.choice([10, 700, 2500, 20000])
                        transaction.put(key, bytes(size), db=database)
                    else:
                        _delete(transaction.cursor(database), key, choose.choice([1, 200]))
            yield folder / "data.mdb"


def _delete(cursor: Any, key: bytes, count: int) -> None:
    found = cursor.set_range(key)
    while found and count:
        found, count = cursor.delete(), count - 1


def test_whatever_lmdb_writes_passes_though_its_last_pages_were_never_written(
    tmp_path: Path,
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    short = 0
    for part in range(8):
        for file in random_writes(tmp_path / str(part), random.Random(seed + part)):
            pages.check_pages(file)
            pages.check_end(file)
            short += file.stat().st_size < (pages.check_heads(file).last_page + 1) * PAGE
    assert short


@pytest.fixture
def replica(tmp_path: Path) -> HostedReplica:
    """One with some commits; closed."""
    replica = HostedReplica(tmp_path / "s")
    replica.create("s", "log")
    make = EntryMaker()
    session, _ = replica.open_writer(1)
    for at in range(1, 41):
        entry = make.whole(size=3000 if at % 3 else 300)
        replica.append(session, [entry], list(SCHEMAS.values()), None, 2**64 - 1)
        replica.commit([IssuedCommit(CommitContext(at, at, at, 1))], at)
    replica.close()
    return HostedReplica(tmp_path / "s")


def data_file(replica: HostedReplica) -> Path:
    return next(replica.folder.glob("segment-*/data.mdb"))


def end_unwritten(file: Path) -> None:
    """A transaction that frees pages at the end which it has taken itself: LMDB does not write them."""
    with lmdb.open(str(file.parent), max_dbs=5, map_size=1 << 30) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as transaction:
            transaction.put(b"other", bytes(200_000), db=meta)
            transaction.delete(b"other", db=meta)


def test_a_segment_whose_last_pages_are_free_and_were_never_written_is_whole(
    replica: HostedReplica,
) -> None:
    file = data_file(replica)
    end_unwritten(file)
    needed = (pages.check_heads(file).last_page + 1) * PAGE
    assert file.stat().st_size < needed
    replica.recover()
    assert replica.outcome == (RecoveryOutcome.VALID, "")
    assert sum(len(batch) for batch in batches(replica, 1, 41)) == 40
    replica.close()


def test_a_segment_that_lacks_a_page_that_is_used_is_kept_aside(replica: HostedReplica) -> None:
    file = data_file(replica)
    half = file.stat().st_size // PAGE // 2 * PAGE
    with file.open("rb+") as opened:
        opened.truncate(half)
    replica.recover()
    outcome, reason = replica.outcome
    assert outcome == RecoveryOutcome.INVALID
    assert f"has {half} bytes, but " in reason or "behind the end of the file" in reason
    assert [path.name[-10:] for path in replica.folder.iterdir()] == [".corrupt-1"]


@pytest.mark.parametrize(
    ("place", "form", "number", "what"),
    [
        (VERSION, "=I", 7, "version 7"),
        (PAGE_SIZE, "=I", 0, "0 is not a page size"),
        (PAGE_SIZE, "=I", 512, "magic|another one|page sizes"),
        (PAGE_SIZE, "=I", 2**31, "is not a page size"),
        (MAIN_ROOT, "=Q", 2**40, "root of a tree"),
        (LAST_PAGE, "=Q", 2**60, "cannot be the last one"),
        (LAST_PAGE, "=Q", 1, "root of a tree"),
        # The older head would be used, and with it the state before the last transaction.
        (TRANSACTION, "=Q", 3, "heads are of transactions"),
        (TRANSACTION, "=Q", 2**40, "heads are of transactions"),
    ],
)
def test_a_damaged_head_is_named_and_its_segment_kept_aside(
    replica: HostedReplica, place: int, form: str, number: int, what: str
) -> None:
    file = data_file(replica)
    newer = pages.check_heads(file).transaction % 2
    content = bytearray(file.read_bytes())
    struct.pack_into(form, content, newer * PAGE + place, number)
    file.write_bytes(content)
    with pytest.raises(CorruptError, match=what):
        pages.check_heads(file)
    replica.recover()
    outcome, reason = replica.outcome
    assert outcome == RecoveryOutcome.INVALID
    assert "renamed to" in reason
    assert replica.report("k") is None


@pytest.mark.parametrize(("place", "form"), [(MAIN_DEPTH, "=H"), (MAIN_ROWS, "=Q")])
def test_a_wrong_count_in_a_head_is_found_by_the_check_of_all_pages(
    replica: HostedReplica, place: int, form: str
) -> None:
    file = data_file(replica)
    pages.check_pages(file)
    newer = pages.check_heads(file).transaction % 2
    content = bytearray(file.read_bytes())
    (before,) = struct.unpack_from(form, content, newer * PAGE + place)
    struct.pack_into(form, content, newer * PAGE + place, before + 3)
    file.write_bytes(content)
    with pytest.raises(CorruptError, match=r"damaged page.*data\.mdb|data\.mdb.*damaged page"):
        pages.check_pages(file)
