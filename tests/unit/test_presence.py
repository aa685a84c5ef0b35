"""A driver's sign of life: there once it is claimed, or the claim fails."""

import errno
import os
from pathlib import Path

import pytest

from spark_consumers.lake.store.local_store import LocalStore
from spark_consumers.lake.writer.presence import Presence


@pytest.fixture
def drivers(tmp_path):
    state = tmp_path / "_tuskline"
    state.mkdir()
    older, newer = (Presence(LocalStore(tmp_path)) for _ in range(2))
    yield older, newer
    older.close()
    newer.close()


def test_a_sign_of_life_that_found_a_full_disk_is_made_by_the_next_claim(
    drivers, tmp_path, monkeypatch
):
    older, newer = drivers

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            older.claim(3)
    assert newer.others() == {}
    assert list((tmp_path / "_tuskline" / "drivers").iterdir()) == []
    older.claim(3)
    assert newer.others()[older.name].term == 3


def test_a_sign_of_life_is_made_again_in_a_lake_that_was_replaced(drivers, tmp_path):
    older, newer = drivers
    older.claim(3)
    state = tmp_path / "_tuskline"
    state.rename(tmp_path / "moved")
    state.mkdir()
    older.claim(1)
    assert newer.others()[older.name].term == 1
    assert [Path(p).name for p in (state / "drivers").iterdir()] == [older.name]


def test_a_driver_that_never_claimed_leaves_nothing(tmp_path):
    (tmp_path / "_tuskline").mkdir()
    Presence(LocalStore(tmp_path)).close()
    assert list((tmp_path / "_tuskline").iterdir()) == []
