"""What a proposer has done on a thread: answers come back in order, and errors do, too."""

import os
import select

import pytest

from walsender_bridge.errors import ConnectionFailedError
from walsender_bridge.quorum.proposer.blocking_executor import BlockingExecutor
from walsender_bridge.runtime.waker import Waker


@pytest.fixture
def waker():
    waker = Waker()
    yield waker
    waker.close()


def served(executor: BlockingExecutor, waker: Waker) -> None:
    assert select.select([waker], [], [], 20)[0], "nothing is done"
    waker.clear()
    executor.serve()


def failing(error: Exception):
    def work():
        raise error

    return work


def test_an_error_that_nobody_foresaw_is_raised_on_the_loop(waker):
    executor = BlockingExecutor(waker)
    told: list[object] = []
    try:
        executor.ask(failing(ConnectionFailedError("refused")), told.append)
        served(executor, waker)
        assert [type(each) for each in told] == [ConnectionFailedError]
        executor.ask(failing(OSError("a disk")), told.append)
        with pytest.raises(OSError, match="a disk"):
            served(executor, waker)
        # The thread lives: what is asked next is answered.
        executor.ask(os.getpid, told.append)
        served(executor, waker)
        assert told[1:] == [os.getpid()]
    finally:
        executor.close()
