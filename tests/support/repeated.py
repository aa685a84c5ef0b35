"""A call that is made again and again in a thread, while a test does something else."""

import threading
import time
from collections.abc import Callable
from typing import Self


class Repeated:
    """See the module. `errors`: those of `kinds` that it raised; `longest`: the most seconds that one call took."""

    def __init__(
        self, call: Callable[[], object], *kinds: type[Exception], pause: float = 0.05
    ) -> None:
        self._call = call
        self._kinds = kinds
        self._pause = pause
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.calls = 0
        self.longest = 0.0
        self.errors: list[Exception] = []

    def _run(self) -> None:
        while not self._over.wait(self._pause):
            began = time.monotonic()
            try:
                self._call()
            except self._kinds as error:
                self.errors.append(error)
            self.calls += 1
            self.longest = max(self.longest, time.monotonic() - began)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
