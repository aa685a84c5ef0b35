"""Damage in complete segments is found by reading them again, and is not served (40)."""

import random

import pytest

from tests.support.wal import MIB, SMALL, Wal
from walsender_bridge.errors import CorruptError
from walsender_bridge.postgres.protocol.replication import ServerTimelines
from walsender_bridge.quorum.safekeeper.storage import checksums as segment_sums
from walsender_bridge.quorum.safekeeper.storage.segments import StorageLimits
from walsender_bridge.quorum.safekeeper.storage.wal import WalStorage
from walsender_bridge.quorum.wal_server.scrub import Scrub
from walsender_bridge.quorum.wal_server.wal_folder import WalCursor, WalFolder
from walsender_bridge.runtime.folder import FolderDisk

DAMAGED = "000000010000000000000002"


@pytest.fixture
def folder(tmp_path, seed):
    wal = Wal()
    wal.fill(3 * MIB + 5000, random.Random(seed), largest=3000)
    storage = WalStorage(FolderDisk(tmp_path), SMALL, StorageLimits(free_bytes=0))
    storage.open()
    storage.reset(MIB)
    storage.write(MIB, wal.piece(MIB, wal.end), 1)
    storage.flush()
    storage.close()
    return WalFolder(tmp_path)


def scrubbed(folder):
    scrub = Scrub(folder)
    while scrub.step():
        pass


def damage(folder):
    with (folder.path / DAMAGED).open("r+b") as file:
        file.seek(123_456)
        byte = file.read(1)
        file.seek(123_456)
        file.write(bytes([byte[0] ^ 1]))


def test_40_one_bit_in_a_complete_segment_is_found_and_not_served(folder):
    scrubbed(folder)
    assert not folder.damaged
    cursor, buffer = WalCursor(folder, MIB), memoryview(bytearray(1000))
    try:
        assert cursor.read_into(buffer, 2 * MIB, 1000, 1, ServerTimelines(1))
        damage(folder)
        scrubbed(folder)
        assert folder.damaged == {DAMAGED}
        # A reader that has it open does not get it either.
        with pytest.raises(CorruptError, match=DAMAGED):
            cursor.read_into(buffer, 2 * MIB + 1000, 1000, 1, ServerTimelines(1))
        assert cursor.read_into(buffer, MIB, 1000, 1, ServerTimelines(1))
    finally:
        cursor.close()


def test_40_a_segment_that_was_replaced_meanwhile_is_no_damage(folder, monkeypatch):
    damage(folder)
    monkeypatch.setattr(Scrub, "_sums", _twice({DAMAGED: 1}, {DAMAGED: 2}))
    Scrub(folder).step()
    assert not folder.damaged
    # What is not known cannot be damaged.
    monkeypatch.undo()
    (folder.path / segment_sums.NAME).unlink()
    scrubbed(folder)
    assert not folder.damaged


def _twice(first, then):
    told = iter([first, then])
    return lambda _self: next(told)
