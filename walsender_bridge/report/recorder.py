"""Records samples of a running installation, in a thread."""

import threading
from typing import Self

from walsender_bridge.config import Config
from walsender_bridge.observability.observation import Observer
from walsender_bridge.report.recording import Sample, sample


class Recorder:
    """Takes a sample every so many seconds while the block runs, and one at its end."""

    def __init__(self, settings: Config, every: float) -> None:
        self.samples: list[Sample] = []
        self._settings = settings
        self._every = every
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def wait(self, seconds: float) -> None:
        """Record for so long."""
        self._stop.wait(seconds)

    def _run(self) -> None:
        with Observer(self._settings) as observer:
            while True:
                self.samples.append(sample(observer.observe()))
                if self._stop.wait(self._every):
                    break
            self.samples.append(sample(observer.observe()))
