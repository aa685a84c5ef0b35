"""Two drivers of one lake under supervision, as processes: one is at work, the other waits, and they do not take turns.

In a folder, in one whose locks other machines do not see, and in a bucket. One is suspended and continued, or cut off from the bucket and
back, and the next is killed; each time one takes over once, and the one that lost ends with the exit code of that, though it had nothing to publish.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spark_consumers.lake.manifest.chain import open_chain
from spark_consumers.lake.store.lake_store import StoreOptions
from tests.support.child import ROOT
from tests.support.relay import Relay
from tests.support.waiting import wait_for
from walsender_bridge.errors import Cause

#: Looks at a driver at work, in which no other one takes over: more than it takes for a free lock to be believed.
LOOKS = 60


class Supervisor:
    """Starts the driver again whenever it ends, as `tuskline up` and systemd do. `ends`: its exit codes."""

    def __init__(self, output: Path, settings: dict[str, object]) -> None:
        self.ends: list[int] = []
        self._output, self._settings = output, settings
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        command = [sys.executable, "-m", "tests.support.records_driver", json.dumps(self._settings)]
        while not self._stop.is_set():
            with self._output.open("ab") as output:
                self._process = subprocess.Popen(
                    command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, cwd=ROOT
                )
            self.ends.append(self._process.wait())
            self._stop.wait(0.2)

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def lines(self) -> list[str]:
        return self._output.read_text().splitlines() if self._output.exists() else []

    def waits(self) -> bool:
        """Whether this driver's last looks found another one."""
        lines = self.lines()
        return "look" in lines[-1:] and lines[-2:-1] != [] and lines[-2].startswith("waits")

    def looks(self, count: int) -> None:
        """Wait until it has looked so often again."""
        before = self.lines().count("look")
        wait_for(lambda: self.lines().count("look") >= before + count, 240, "looks")

    @contextlib.contextmanager
    def running(self) -> Iterator["Supervisor"]:
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            if self._process is not None:
                self._process.kill()
            self._thread.join(10)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["folder", "own locks", "bucket"])
def test_35_supervised_drivers_take_over_from_dead_ones_alone(tmp_path, s3_port, s3_keys, place):
    with contextlib.ExitStack() as stack:
        url, options, relays = str(tmp_path / "lake"), StoreOptions(), []
        if place == "bucket":
            url = f"s3://lakes/{tmp_path.name}"
            options = StoreOptions(f"http://127.0.0.1:{s3_port}", "us-east-1", allow_http=True)
            relays = [stack.enter_context(Relay(s3_port)) for _ in range(2)]
        drivers = [
            Supervisor(
                tmp_path / f"driver{number}",
                {
                    "url": url,
                    "own_locks": place == "own locks",
                    "endpoint": f"http://127.0.0.1:{relays[number].port}" if relays else None,
                },
            )
            for number in range(2)
        ]
        first, second = drivers

        def has_term(term):
            head = open_chain(url, options).head()
            return head is not None and head.term == term

        def leaves_in_peace(waiting, term):
            waiting.looks(LOOKS if place != "bucket" else 8)
            assert has_term(term)

        stack.enter_context(first.running())
        wait_for(lambda: "works 1" in first.lines(), 60, "the first driver")
        stack.enter_context(second.running())
        wait_for(second.waits, 60, "the second driver waits")
        leaves_in_peace(second, 1)

        if relays:
            relays[0].freeze()
            wait_for(lambda: "works 2" in second.lines(), 120, "the takeover from one cut off")
            relays[0].thaw()
        else:
            first.signal(signal.SIGSTOP)
            wait_for(lambda: "works 2" in second.lines(), 120, "the takeover from one suspended")
            first.signal(signal.SIGCONT)
        wait_for(lambda: first.ends == [Cause.FENCED], 60, "the one that lost ends")
        assert "another writer has taken over, under term 2" in "\n".join(first.lines())
        wait_for(first.waits, 60, "it waits")
        leaves_in_peace(first, 2)

        began = time.monotonic()
        second.signal(signal.SIGKILL)
        # The other one, or its own successor: both see no more beats of the dead one.
        wait_for(
            lambda: "works 3" in [*first.lines(), *second.lines()], 120, "the next after a dead one"
        )
        print(f"{place}: replaced after {time.monotonic() - began:.1f} s")
        waiting = second if "works 3" in first.lines() else first
        wait_for(waiting.waits, 60, "the other one waits")
        leaves_in_peace(waiting, 3)
        assert first.ends.count(Cause.FENCED) == 1
