"""Waiting for what another process does."""

import time
from collections.abc import Callable
from typing import Any


def wait_for(check: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true answer of `check`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := check()):
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.01)
    return answer
