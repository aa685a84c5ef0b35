"""Work on slots: never two pieces on one, errors told once, and an end that waits for nobody."""

import threading

from slot_sync.keyed_worker_pool import KeyedWorkerPool
from tests.support.waiting import wait_for
from walsender_bridge.errors import SlotError


def test_a_slot_has_one_piece_of_work_at_a_time_and_others_go_on():
    over, other = threading.Event(), threading.Event()

    def stuck() -> None:
        over.wait(30)

    with KeyedWorkerPool("near", workers=2) as pool:
        assert pool.submit("stuck", stuck)
        assert not pool.submit("stuck", lambda: None)
        assert pool.submit("other", other.set)
        assert other.wait(10)
        # It is at work until its worker has said how it ended.
        wait_for(lambda: [*pool.busy()] == ["stuck"], 10, "the other one is done")
        assert not pool.wait(0.05)
        over.set()
        assert pool.wait(10)
        assert pool.ended() == {"other": None, "stuck": None}
        assert pool.ended() == {}


def test_a_fault_of_any_kind_is_told_and_ends_no_worker():
    def refused() -> None:
        raise SlotError("in use", where="near")

    def broken() -> None:
        raise ZeroDivisionError("ours")

    with KeyedWorkerPool("near", workers=1) as pool:
        pool.submit("first", refused)
        pool.submit("second", broken)
        pool.submit("third", lambda: None)
        assert pool.wait(10)
        ended = pool.ended()
    assert isinstance(ended["first"], SlotError)
    assert "ZeroDivisionError" in str(ended["second"])
    assert ended["third"] is None


def test_what_was_not_begun_at_the_end_is_not_done():
    begun, over, done = threading.Event(), threading.Event(), threading.Event()
    pool = KeyedWorkerPool("near", workers=1)

    def first() -> None:
        begun.set()
        over.wait(30)

    pool.submit("first", first)
    pool.submit("second", done.set)
    assert begun.wait(10)
    pool.close()
    over.set()
    assert not done.wait(0.2)
