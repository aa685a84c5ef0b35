"""Waiting for what another process does."""

import time
from collections.abc import Callable
from typing import Any


def wait_for(check: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true answer of `check`; fails after `seconds`.

    A look that takes long is followed by a pause: what is waited for needs the processor too.
    """
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if answer := check():
            return answer
        now = time.monotonic()
        assert now < deadline, f"{what}: not within {seconds} s"
        time.sleep(min(max(0.01, 9 * (now - began)), 0.2))
