"""How long a synchronization rests: appends that meet a batch may be slow, one in a hundred of all."""

import random
import threading
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest

from tests.support.log_entries import SCHEMAS, EntryMaker, append_to
from walsender_bridge.change_log import log_server_messages as m
from walsender_bridge.change_log.client import ReplicaClient
from walsender_bridge.change_log.protocol import CommitContext, IssuedCommit
from walsender_bridge.change_log.replica import sync_throttle
from walsender_bridge.change_log.replica.service import ReplicaServer
from walsender_bridge.change_log.replica.sync_pace import LEAST, LONGEST, MOST, SLOW, SyncPace
from walsender_bridge.change_log.replica.sync_throttle import Throttle
from walsender_bridge.change_log.replica.synchronization import SYNC_BATCH_BYTES


class Server:
    """A log server with 200 appends a second, each of which takes `usual` seconds, and `beside` if it meets a batch."""

    def __init__(self, usual: float, beside: float, batch: float = 0.01, seed: int = 1) -> None:
        self.usual, self.beside, self.batch = usual, beside, batch
        self.choose = random.Random(seed)
        self.pace, self.now = SyncPace(), 0.0

    def run(self, seconds: float) -> float:
        """The part of these seconds that batches took."""
        took, end, free = 0.0, self.now + seconds, self.now
        pending: list[tuple[float, float]] = []
        while self.now < end:
            began, ended = self.now, self.now + self.batch
            took += self.batch
            begun = range(int(free * 200), int(ended * 200))
            pending += [self._append(at / 200, began) for at in begun]
            # A log server knows of an append when it has ended, which may be after the batch that it met.
            found = [each for each in pending if each[1] <= ended]
            pending = [each for each in pending if each[1] > ended]
            free = ended
            self.now = ended + self.pace.rest(began, ended, found)
        return took / (self.now - end + seconds)

    def _append(self, at: float, began: float) -> tuple[float, float]:
        meets = at + self.usual > began
        takes = (self.beside if meets else self.usual) * self.choose.uniform(0.95, 1.05)
        return at, at + takes


def test_36_appends_that_take_no_longer_leave_half_of_the_time_to_batches() -> None:
    server = Server(0.002, 0.002)
    assert server.run(60) == pytest.approx(MOST, abs=0.02)
    assert server.pace.share == MOST


def test_36_appends_that_are_slow_beside_a_batch_have_it_rest() -> None:
    server = Server(0.002, 0.02)
    server.run(20)
    assert server.pace.share < MOST / 4
    share = server.run(60)
    assert LEAST * 0.9 <= share < MOST / 4, "it goes on, and leaves more than half"


def test_36_what_was_slow_for_a_while_is_made_good() -> None:
    server = Server(0.002, 0.02)
    server.run(20)
    server.beside = 0.002
    server.run(60)
    assert server.pace.share == MOST


@pytest.mark.parametrize("batch", [0.001, 0.1, 1.0, 5.0, 60.0])
@pytest.mark.parametrize("beside", [0.002, 0.05])
def test_36_a_rest_is_as_long_as_its_batch_at_least_and_ends(batch: float, beside: float) -> None:
    """Also where a batch takes a minute: half of the disk is left to others, and the replica comes closer."""
    pace = SyncPace()
    for number in range(200):
        began = number * 100.0
        appends = [(began - 1, began - 1 + 0.002)] * 3 + [(began, began + beside)] * 3
        rest = pace.rest(began, began + batch, appends)
        assert batch * 0.999 <= rest <= batch + LONGEST
    assert LEAST <= pace.share <= MOST


def test_36_all_synchronizations_of_a_log_server_share_its_rests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch of any waits for the rest of every other, and a destination that hangs keeps none of them waiting."""
    monkeypatch.setattr(sync_throttle, "TURN", 0.05)
    throttle = Throttle()
    throttle.pace.share = LEAST
    first, second = throttle.paced(iter("ab")), throttle.paced(iter("xy"))
    assert next(first) == "a"
    assert next(second) == "x", "the first one's destination hangs"
    throttle._sent(0.0, 0.5)
    assert throttle._free_at == pytest.approx(0.5 + 2.5, abs=1e-6)
    throttle._sent(0.1, 0.6)
    assert throttle._free_at == pytest.approx(3.0 + 2.5, abs=1e-6)


def test_36_synchronizations_that_wait_for_the_same_rest_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All at once, an append would meet the batches of all of them."""
    monkeypatch.setattr(sync_throttle, "TURN", 600.0)
    throttle, sent = Throttle(), []
    throttle._free_at = time.monotonic() + 0.3

    def synchronize() -> None:
        for _ in throttle.paced(iter(range(3))):
            began = time.monotonic()
            time.sleep(0.02)
            sent.append((began, time.monotonic()))

    threads = [threading.Thread(target=synchronize) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(sent) == 12
    for (_, ended), (began, _) in pairwise(sorted(sent)):
        assert ended <= began


def test_36_a_synchronization_that_fails_ends_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_throttle, "TURN", 600.0)
    throttle = Throttle()
    failed = throttle.paced(iter("ab"))
    assert next(failed) == "a"
    failed.close()
    assert [*throttle.paced(iter("x"))] == ["x"]


def test_36_no_append_is_a_usual_one_that_met_a_batch_which_still_goes_on() -> None:
    """Slow batches that overlap would make slow appends usual ones, and take half of the time beside them."""
    pace = SyncPace()
    for number in range(200):
        now = number * 10.0
        alone, beside = [(now, now + 0.002)] * 3, [(now + 2, now + 2.05)] * 3
        pace.rest(now + 3, now + 4, alone + beside, now + 1)
        pace.rest(now + 1, now + 5, [(now + 4, now + 4.05)] * 3)
    assert pace.share == LEAST


class SharedDisk:
    """A log server's disk on a clock of its own: batches of `throttle` and appends, 200 a second, which wait for a batch they meet."""

    def __init__(self, throttle: Throttle | None, beside: float) -> None:
        self.now, self.beside = 0.0, beside
        self.throttle = throttle
        #: By second: bytes given to synchronization, and appends that took more than `SLOW` times as long as alone.
        self.given: Counter[int] = Counter()
        self.slow: Counter[int] = Counter()
        self._appended = 0
        #: Appends that have not ended: how long they take.
        self._pending: list[tuple[float, float]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self._pass(seconds, batch=False)

    def synchronize(self, seconds: float) -> None:
        """As `synchronizer.synchronize` does it, for so long: the source reads a batch, and its destination answers."""
        batches = iter(lambda: SYNC_BATCH_BYTES, None)
        for size in batches if self.throttle is None else self.throttle.paced(batches):
            self._pass(0.01, batch=True)
            self.given[int(self.now)] += size
            if self.now >= seconds:
                return

    def _pass(self, seconds: float, *, batch: bool) -> None:
        end = self.now + seconds
        while self._appended / 200 < end:
            began = self._appended / 200
            takes = self.beside if batch else ALONE
            self.slow[int(began)] += takes > SLOW * ALONE
            self._pending.append((began, began + takes))
            self._appended += 1
        self.now = end
        for each in [each for each in self._pending if each[1] <= end]:
            self._pending.remove(each)
            if self.throttle is not None:
                self.throttle.appended(*each)


#: Seconds that an append takes alone.
ALONE: Final = 0.002


@pytest.mark.parametrize("beside", [2, 3, 10])
def test_36_a_second_beside_slow_appends_has_few_bytes_for_a_synchronization(
    beside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, so on any machine: at most a tenth of what an unthrottled one gets, and at most a tenth of the appends are slow."""
    unthrottled = SharedDisk(None, beside * ALONE)
    unthrottled.synchronize(30)
    throttled = SharedDisk(Throttle(), beside * ALONE)
    monkeypatch.setattr(sync_throttle, "time", throttled)
    throttled.synchronize(60)
    assert min(unthrottled.given[s] for s in range(1, 29)) >= 99 * SYNC_BATCH_BYTES
    assert min(unthrottled.slow[s] for s in range(1, 29)) == 200, "all of them meet a batch"
    for second in range(20, 59):
        assert SYNC_BATCH_BYTES <= throttled.given[second] <= 10 * SYNC_BATCH_BYTES, second
        assert throttled.slow[second] <= 20, second


def test_36_a_second_beside_appends_that_are_not_slow_has_half_of_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    throttled = SharedDisk(Throttle(), 0.9 * SLOW * ALONE)
    monkeypatch.setattr(sync_throttle, "time", throttled)
    throttled.synchronize(30)
    for second in range(1, 29):
        assert 45 * SYNC_BATCH_BYTES <= throttled.given[second] <= 51 * SYNC_BATCH_BYTES, second


def test_36_a_throttled_synchronization_between_log_servers_rests_half_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over their ports, with a writer beside it; one that is not throttled does not rest at all."""
    sent: list[tuple[float, float]] = []
    really = Throttle._sent

    def noted(self: Throttle, began: float, ended: float) -> None:
        sent.append((began, ended))
        really(self, began, ended)

    monkeypatch.setattr(Throttle, "_sent", noted)
    source = ReplicaServer(tmp_path / "source", "127.0.0.1:0")
    others = [ReplicaServer(tmp_path / name, "127.0.0.1:0") for name in ("a", "b")]
    try:
        _fill(source)
        for throttled, to in zip((False, True), others, strict=True):
            with ReplicaClient(to.address) as there, ReplicaClient(source.address) as here:
                there._call(m.LEARN, m.CreateRequest("shop", "log"))
                request = m.SynchronizeRequest("shop", to.address, throttled)
                status = here._call(m.SYNCHRONIZE, request)
            assert (status.state, status.committed_end) == ("sealed", 9)
            assert bool(sent) == throttled
        assert len(sent) >= 4, "several batches"
        for (began, ended), (after, _) in pairwise(sent):
            assert after - ended >= (ended - began) * 0.999
    finally:
        for each in (source, *others):
            each.stop()


def _fill(source: ReplicaServer) -> None:
    """Eight commits of 200 KB."""
    make = EntryMaker()
    with ReplicaClient(source.address) as client:
        client._call(m.CREATE, m.CreateRequest("shop", "log"))
        with append_to(client, "shop", 1) as writer:
            for version in range(1, 9):
                writer.send([make.whole(size=200_000)], schemas=list(SCHEMAS.values()))
                assert writer.next_ack(30) is not None
                context = CommitContext(version, version, version, 1)
                client._call(m.COMMIT, m.CommitRequest({"shop": (IssuedCommit(context),)}, version))
        assert source.throttle._appends, "appends are measured"
