"""A lake in a bucket under attack: its driver is killed again and again, its store fails, while a reader reads all the time."""

import random
import threading
import time
from contextlib import contextmanager

import pytest

from spark_consumers import read
from tests.spark.test_lake_s3 import _all_shown, _links, assert_whole_and_clean, driven
from tests.support import bank_load
from tests.support.s3 import FaultProxy, options_at
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("s3_keys")]


class Reader:
    """Reads the newest epoch all the time: each is whole, and none is older than the one before."""

    def __init__(self, spark, lake, store):
        self._spark, self._lake, self._store = spark, lake, store
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.epochs = []
        self.errors = []

    @contextmanager
    def reading(self):
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._thread.join()

    def _run(self):
        moves = 0
        while not self._stop.is_set():
            try:
                shown = read(self._spark, self._lake, store=self._store)
                bank_load.check(shown)
                ids = [row.id for row in shown["moves"].select("id").collect()]
                assert len(set(ids)) == len(ids) >= moves
                assert not self.epochs or shown.epoch >= self.epochs[-1]
                moves = len(ids)
                self.epochs.append(shown.epoch)
            except Exception as error:  # the test asserts that there is none
                self.errors.append(error)
                return


def _wait_for_links(stack, store, more):
    after = _links(stack, store) + more
    wait_for(lambda: _links(stack, store) >= after, 240, "links")


@pytest.mark.timeout(1800)
def test_a_driver_that_is_killed_at_any_moment_shows_whole_epochs_only(
    tmp_path, database, spark, s3_port, seed
):
    store, draw = options_at(s3_port), random.Random(seed)
    with driven(tmp_path, database, s3_port) as stack:
        wait_for(lambda: _all_shown(stack, store), 240, "the first epoch")
        reader = Reader(spark, stack.lake, store)
        with bank_load.load(database.dsn, seed), reader.reading():
            for number in range(12):
                # In the first seconds: the start, the wait for the dead driver, the takeover. Then its first epochs.
                if number % 4:
                    _wait_for_links(stack, store, number % 4)
                time.sleep(draw.uniform(0, 20 if number % 4 == 0 else 2))
                assert reader.errors == []
                stack.kill("lake")
                stack.start("lake")
        assert reader.errors == []
        assert len(set(reader.epochs)) > 3
        assert_whole_and_clean(spark, stack, store, database)


FAULTS = ("500", "503", "drop", "cut", "lost", "slow")


@pytest.mark.timeout(1500)
def test_a_store_that_fails_stops_and_is_slow_shows_whole_epochs_only(
    tmp_path, database, spark, s3_port, seed
):
    store, proxy, draw = options_at(s3_port), FaultProxy(s3_port, hang=0.2), random.Random(seed)
    modes = {
        "failing": lambda *_: draw.choice(FAULTS) if draw.random() < 0.05 else "",
        "stopped": lambda *_: "lost",
        "slow": lambda *_: "slow",
        "well": lambda *_: "",
    }
    with proxy.running(), driven(tmp_path, database, proxy.port) as stack:
        wait_for(lambda: _all_shown(stack, store), 300, "the first epoch")
        reader = Reader(spark, stack.lake, store)
        with bank_load.load(database.dsn, seed), reader.reading():
            for mode in ("failing", "stopped", "slow", "failing"):
                proxy.choose = modes[mode]
                if mode == "stopped":
                    before = _links(stack, store)
                    time.sleep(60)
                    assert _links(stack, store) <= before + 1
                else:
                    _wait_for_links(stack, store, 3)
                assert reader.errors == []
            proxy.choose = modes["well"]
            _wait_for_links(stack, store, 2)
        assert reader.errors == []
        assert len(set(reader.epochs)) > 3
        assert_whole_and_clean(spark, stack, store, database)
