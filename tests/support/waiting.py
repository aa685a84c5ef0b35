"""Waiting for what another process does."""

import time
from collections.abc import Callable
from typing import Any


def wait_for(check: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true answer of `check`; fails after `seconds`.

    What is waited for needs the processor too. So a look is followed by a pause of nine times as long, and what has
    not come soon is looked for less often, up to five times in a second; a command takes half of the time at most.
    """
    started = time.monotonic()
    deadline = started + seconds
    while True:
        began = time.monotonic()
        if answer := check():
            return answer
        now = time.monotonic()
        assert now < deadline, f"{what}: not within {seconds} s"
        look = now - began
        time.sleep(max(min(max(0.01, 9 * look, (now - started) / 20), 0.2), min(look, 1.0)))
