"""A driver's sign of life: there once it is claimed, or the claim fails."""

import errno
import json
import os
from pathlib import Path

import pytest

from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.manifest.takeover import LEASE, UNLOCKED_LEASE
from spark_consumers.lake.store.local_store import LocalStore
from spark_consumers.lake.writer.presence import DRIVERS, Presence, living
from spark_consumers.lake.writer.standby import Standby


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


def other_machine(store, number, term, beat=1):
    """A sign of a driver on another machine: its lock, if it is held, is invisible from here."""
    sign = {"term": term, "beat": beat, "pid": 7, "locks": "another kernel"}
    store.replace(f"{DRIVERS}/d{number}", json.dumps(sign).encode(), durable=False)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def lake(tmp_path):
    chain = open_chain(tmp_path / "lake")
    chain.initialise("log", "iceberg")
    (tmp_path / "lake" / DRIVERS).mkdir()
    return chain


def test_signs_of_drivers_that_died_before_their_housekeeping_do_not_pile_up(lake):
    """Each claimed the next term, and died before it had it."""
    for number in range(120):
        other_machine(lake.store, number, term=1)
    clock, presence = Clock(), Presence(lake.store)
    standby = Standby(lake, presence, clock)
    while standby.stands_by():
        assert len(lake.store.names(DRIVERS)) == 120, "they may live"
        clock.now += 1.0
    assert clock.now - 100.0 < LEASE
    left = lake.store.names(DRIVERS)
    assert len(left) == 20, "a takeover does not wait for all of them"
    other_machine(lake.store, 500, term=3)
    for name in left[:5]:
        other_machine(lake.store, name.removeprefix("d"), term=0)
    presence.forget_overtaken(2)
    # One that waits, and one that comes after us.
    assert sorted(lake.store.names(DRIVERS)) == sorted([*left[:5], "d500"])


def test_a_living_driver_whose_sign_was_removed_makes_it_again(drivers, tmp_path):
    older, newer = drivers
    older.claim(3)
    newer.forget([older.name])
    assert newer.others() == {}
    older.claim(3)
    assert newer.others()[older.name].term == 3


def test_housekeeping_takes_a_driver_of_another_machine_for_dead_after_a_few_beats(lake):
    """Two looks may come between two of its beats."""
    clock = Clock()
    signs = living(lake.store, clock)
    other_machine(lake.store, 1, term=3)
    assert [record.name for record in signs.records()] == ["d1"]
    clock.now += 0.5
    assert [record.name for record in signs.records()] == ["d1"]
    for beat in range(2, 9):
        clock.now += 1.0
        other_machine(lake.store, 1, term=3, beat=beat)
        assert [record.name for record in signs.records()] == ["d1"]
    clock.now += UNLOCKED_LEASE + 0.1
    assert signs.records() == []
    # Of this machine, a free lock is a proof.
    other_machine(lake.store, 2, term=3)
    mine = {"term": 3, "beat": 1, "pid": 7, "locks": lake.store.lock_domain}
    lake.store.replace(f"{DRIVERS}/mine", json.dumps(mine).encode(), durable=False)
    assert [record.name for record in signs.records()] == ["d2"]
