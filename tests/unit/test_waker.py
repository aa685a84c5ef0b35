"""What wakes a poll loop, also when the loop ends at that moment."""

import os
import select

from walsender_bridge.runtime.waker import Waker


def readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


def test_it_is_readable_until_it_is_cleared():
    waker = Waker()
    assert not readable(waker.fileno())
    for _ in range(100_000):  # more than a pipe holds
        waker.wake()
    assert readable(waker.fileno())
    waker.clear()
    assert not readable(waker.fileno())
    waker.close()


def test_a_loop_that_has_ended_is_not_woken_and_no_other_file_written(tmp_path):
    """A stopped loop may close it before the thread that stops it has written."""
    waker = Waker()
    waker.close()
    # Both numbers are given to the next files.
    others = [os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("a", "b")]
    waker.wake()
    for other in others:
        assert os.fstat(other).st_size == 0
        os.close(other)
