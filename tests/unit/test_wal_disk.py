"""Where a file system has no O_DIRECT, or not for our writes: the WAL is as durable, through the page cache."""

import errno
import fcntl
import os
import random

import pytest

from tests.support.wal import MIB, SMALL, Wal
from walsender_bridge.quorum.safekeeper.storage.segments import StorageLimits
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage
from walsender_bridge.runtime.folder import FolderDisk

END = 2 * MIB + 12_345


def refuse_opening(calls, monkeypatch):
    """As tmpfs did for long."""
    opened = os.open

    def refusing(path, flags, *more, **named):
        if flags & os.O_DIRECT:
            calls.append("open")
            raise OSError(errno.EINVAL, "no O_DIRECT here", path)
        return opened(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)


def refuse_writing(calls, monkeypatch):
    """As some network and stacked file systems do."""
    written = os.pwrite

    def refusing(descriptor, data, offset):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            calls.append("write")
            raise OSError(errno.EINVAL, "not for this write")
        return written(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", refusing)


@pytest.mark.parametrize("refuse", [refuse_opening, refuse_writing])
def test_9_a_file_system_without_o_direct_gets_o_dsync_alone(tmp_path, monkeypatch, seed, refuse):
    calls: list[str] = []
    writes: list[tuple[bool, bool, int, int]] = []
    written = os.pwrite

    def note(descriptor, data, offset):
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        writes.append((bool(flags & os.O_DSYNC), bool(flags & os.O_DIRECT), offset, len(data)))
        return written(descriptor, data, offset)

    wal = Wal()
    wal.fill(3 * MIB, random.Random(seed), largest=5000)
    storage = WalStorage(FolderDisk(tmp_path), SMALL, StorageLimits(free_bytes=0))
    storage.open()
    storage.reset(MIB)
    monkeypatch.setattr(os, "pwrite", note)
    refuse(calls, monkeypatch)
    while storage.write_lsn < END:
        end = min(storage.write_lsn + 100_000, END)
        storage.write(storage.write_lsn, wal.piece(storage.write_lsn, end), wal.timeline)
        storage.flush()
        # What is acknowledged was written with O_DSYNC, up to its end, and never by what was refused.
        assert not any(direct for _, direct, _, _ in writes)
        offset, length = [(at, size) for dsync, _, at, size in writes if dsync][-1]
        assert offset + length >= (storage.flush_lsn - 1) % MIB + 1
    assert calls
    assert storage.flush_lsn == END
    monkeypatch.undo()
    again = WalStorage(FolderDisk(tmp_path), SMALL, StorageLimits(free_bytes=0))
    again.open()
    # An end inside a record is found at the last whole one.
    assert MIB < END - 5000 - 8192 < again.flush_lsn <= END
    length = again.flush_lsn - MIB
    assert again.read(MIB, MIB) == wal.piece(MIB, 2 * MIB)
    assert again.read(2 * MIB, length - MIB) == wal.piece(2 * MIB, again.flush_lsn)
