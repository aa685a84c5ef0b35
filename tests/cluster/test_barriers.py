"""Barriers that wait in the metadata repository: whose client has gone, too many, and how they is_urgent it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.capture_stack import ChangeLog
from tests.support.waiting import wait_for
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.change_log.repository import barriers
from walsender_bridge.errors import UnavailableError

STREAM = "shop"
#: So many barriers that are never reached, and what is said to those that are refused.
BARRIERS = """
import sys, threading, time
from walsender_bridge.change_log.client import LogClient
from walsender_bridge.errors import TusklineError
def wait():
    try:
        with LogClient(sys.argv[1]) as client:
            client.barrier({"shop": 2**62}, 86_400.0)
    except TusklineError as error:
        print(error.what, flush=True)
for _ in range(int(sys.argv[2])):
    threading.Thread(target=wait, daemon=True).start()
time.sleep(3600)
"""


def test_barriers_end_with_their_clients(tmp_path: Path) -> None:
    with ChangeLog(tmp_path) as log, LogClient(log.address) as client:
        wait_for(lambda: _stream(client), 30, "the stream")
        assert log.repository is not None
        waiting = log.repository.barriers
        with subprocess.Popen([sys.executable, "-c", BARRIERS, log.address, "20"]) as others:
            try:
                wait_for(lambda: len(waiting.waiting) == 20, 60, "the barriers wait")
            finally:
                others.kill()
        wait_for(lambda: not waiting.waiting, 60, "they are forgotten with their client")
        assert client.barrier({}, 30)


def test_barriers_beyond_the_most_are_refused_and_the_others_wait_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(barriers, "MOST_BARRIERS", 3)
    with ChangeLog(tmp_path) as log, LogClient(log.address) as client:
        wait_for(lambda: _stream(client), 30, "the stream")
        assert log.repository is not None
        waiting = log.repository.barriers
        command = [sys.executable, "-c", BARRIERS, log.address, "4"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as others:
            try:
                assert others.stdout is not None
                assert others.stdout.readline() == "too many barriers: 3 are waiting\n"
                wait_for(lambda: len(waiting.waiting) == 3, 30, "the others wait on")
                with pytest.raises(UnavailableError, match="too many barriers: 3 are waiting"):
                    client.barrier({}, 30)
            finally:
                others.kill()


def test_a_barrier_that_waits_long_hurries_nobody() -> None:
    clock = 100.0
    waiting = barriers.Barriers(lambda: clock)
    assert not waiting.is_urgent()
    barrier = waiting.add({STREAM: 7})
    assert waiting.is_urgent()
    clock += barriers.URGENT_SECONDS + 1
    assert not waiting.is_urgent()
    waiting.add({STREAM: 8})
    assert waiting.is_urgent()
    waiting.remove(barrier)
    assert [each.positions for each in waiting.unforced()] == [{STREAM: 8}]


def test_one_that_settles_waits_for_answers_that_were_asked_for_before_it() -> None:
    """They may show what its client is about to remove. Those that are asked for later cannot hold it up."""
    clock = 100.0
    waiting = barriers.Barriers(lambda: clock)
    settles, positions = waiting.add({}), waiting.add({STREAM: 7})
    assert waiting.due(None) == [settles, positions]
    assert waiting.due(99.0) == waiting.due(100.0) == [positions]
    assert waiting.due(100.1) == [settles, positions]
    settles.version = 1
    assert waiting.due(None) == [positions]


def _stream(client: LogClient) -> str | None:
    try:
        return client.create_stream(STREAM).addresses[0]
    except UnavailableError:
        return None
