"""Readers hold what they read, for as long as they live and need it."""

import fcntl
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from spark_consumers.lake.manifest import reader_leases
from spark_consumers.lake.manifest.reader_files import new_folder, remove_dead
from spark_consumers.lake.manifest.reader_leases import ReaderLease, Readers, lease_on
from spark_consumers.lake.store.living import DEAD_AFTER, LAPSE
from spark_consumers.lake.store.local_store import LocalStore
from tests.support.waiting import wait_for


class Reader:
    """Stands for a `Snapshot`."""


def held_from(root):
    return Readers(LocalStore(root)).held_from()


@pytest.fixture
def root(tmp_path, monkeypatch):
    (tmp_path / "_tuskline").mkdir()
    monkeypatch.setattr(reader_leases, "_leases", {})
    return tmp_path


def test_a_lease_holds_everything_until_the_link_is_known(root):
    state = root / "_tuskline"
    assert held_from(root) is None
    lease = lease_on(LocalStore(root))
    assert lease is not None
    older, newer = Reader(), Reader()
    with lease.resolving():
        assert held_from(root) == 0
        lease.keep(older, 7)
    assert held_from(root) == 7
    with lease.resolving():
        assert held_from(root) == 0
        lease.keep(newer, 9)
    assert held_from(root) == 7
    assert lease_on(LocalStore(root)) is lease
    assert len(list((state / "readers").iterdir())) == 1


def test_an_epoch_is_held_for_a_while_after_its_last_reader(root, monkeypatch):
    root / "_tuskline"
    lease = lease_on(LocalStore(root))
    assert lease is not None
    older, newer = Reader(), Reader()
    with lease.resolving():
        lease.keep(older, 7)
        lease.keep(newer, 9)
    del older
    gc.collect()
    lease.refresh()
    # DataFrames that were made of it may still be read.
    assert held_from(root) == 7
    monkeypatch.setattr(reader_leases, "HOLD", 0.0)
    lease.refresh()
    assert held_from(root) == 9
    del newer
    gc.collect()
    lease.refresh()
    assert held_from(root) == 10**20 - 1


def test_a_reader_that_died_holds_nothing(root):
    state = root / "_tuskline"
    code = (
        "import sys, time; from pathlib import Path;"
        "from spark_consumers.lake.manifest.reader_leases import lease_on;"
        "from spark_consumers.lake.store.local_store import LocalStore;"
        "lease = lease_on(LocalStore(Path(sys.argv[1]))); lease.keep(lease, 7); lease.refresh();"
        "print('there', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE
    ) as reader:
        try:
            assert reader.stdout is not None
            reader.stdout.readline()
            assert held_from(root) == 7
        finally:
            reader.kill()
    assert held_from(root) is None
    assert list((state / "readers").iterdir()) == []


def test_a_reader_whose_lock_is_invisible_holds_its_link_while_it_beats(root, monkeypatch):
    """As one on another machine, on a file system that keeps locks to each of them."""
    reader, clock = Reader(), [0.0]
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(LocalStore, "lock_domain", "another-kernel 7")
        elsewhere.setattr(fcntl, "flock", lambda *_: None)
        lease = lease_on(LocalStore(root))
        assert lease is not None
        with lease.resolving():
            lease.keep(reader, 7)
    readers = Readers(LocalStore(root), lambda: clock[0])
    for _ in range(3):
        assert readers.held_from() == 7
        clock[0] += DEAD_AFTER - 1
        lease.refresh()
    assert readers.held_from() == 7
    # It is dead, for all that can be seen.
    clock[0] += DEAD_AFTER + 1
    assert readers.held_from() is None
    assert list((root / "_tuskline" / "readers").iterdir()) == []


def test_the_files_of_a_reader_stay_when_its_record_is_another_one(root, monkeypatch):
    """In a bucket, whose store did not answer for a while."""
    monkeypatch.setattr(LocalStore, "has_locks", False)
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    now, dead_at = [0.0], [0.0]
    lease = ReaderLease(LocalStore(root), lambda: now[0])
    readers = Readers(LocalStore(root), lambda: dead_at[0])
    its, others = (new_folder(root, reader) for reader in (lease.reader, "nobody"))
    for folder in (its, others):
        folder.mkdir(parents=True)
    remove_dead(root, readers.names)
    assert (its.exists(), others.exists()) == (True, False)
    now[0] += LAPSE
    lease.refresh()
    assert readers.names() == {lease.reader}
    dead_at[0] += DEAD_AFTER
    lease.refresh()
    remove_dead(root, readers.names)
    assert len([*(root / "_tuskline" / "readers").iterdir()]) == 1
    assert its.exists()


def test_a_reader_that_may_not_write_reads_without_a_lease(root):
    (root / "_tuskline" / "readers").write_text("no folder can be made here")
    assert lease_on(LocalStore(root)) is None


@pytest.mark.parametrize("how", ["removed", "moved away"])
def test_a_lake_that_was_replaced_in_its_folder_gets_a_lease_of_its_own(root, how):
    state = root / "_tuskline"
    older = lease_on(LocalStore(root))
    assert older is not None
    if how == "removed":
        shutil.rmtree(state)
    else:
        state.rename(root / "moved")
    state.mkdir()
    newer = lease_on(LocalStore(root))
    assert newer is not None
    reader = Reader()
    with newer.resolving():
        assert held_from(root) == 0
        newer.keep(reader, 4)
    assert held_from(root) == 4
    assert lease_on(LocalStore(root)) is newer
    assert older.is_lost()


def test_a_forked_child_has_a_lease_of_its_own(root):
    root / "_tuskline"
    lease = lease_on(LocalStore(root))
    assert lease is not None
    reader = Reader()
    with lease.resolving():
        lease.keep(reader, 7)

    def read_in_the_child() -> None:
        own = lease_on(LocalStore(root))
        assert own is not None
        assert own is not lease
        with own.resolving():
            own.keep(reader, 9)
        # The parent goes on to hold what it reads, and the child does not write for it.
        assert held_from(root) == 7

    child = multiprocessing.get_context("fork").Process(target=read_in_the_child)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert held_from(root) == 7


def test_a_forked_child_does_not_hold_what_its_dead_parent_has_read(root, tmp_path):
    root / "_tuskline"
    code = (
        "import os, sys, time; from pathlib import Path;"
        "from spark_consumers.lake.manifest.reader_leases import lease_on;"
        "from spark_consumers.lake.store.local_store import LocalStore;"
        "lease = lease_on(LocalStore(Path(sys.argv[1]))); lease.keep(lease, 7); lease.refresh();"
        "child = os.fork(); ready = print(child, flush=True) if child else None;"
        "time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE
    ) as reader:
        assert reader.stdout is not None
        child = int(reader.stdout.readline())
        try:
            assert held_from(root) == 7
            reader.kill()
            reader.wait()
            wait_for(lambda: held_from(root) is None, 30, "the lease ends with its process")
        finally:
            os.kill(child, signal.SIGKILL)
