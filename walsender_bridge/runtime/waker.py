"""Wakes a poll loop from other threads and from signal handlers."""

import contextlib
import os


class Waker:
    """A descriptor to poll that other threads, and signals, make readable."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """What to poll for reading."""
        return self._read

    def wake(self) -> None:
        """Make it readable."""
        with contextlib.suppress(BlockingIOError):  # full: it is readable
            os.write(self._write, b"\0")

    def clear(self) -> None:
        """Make it quiet; call before looking for what the wakers left."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def close(self) -> None:
        """Give the descriptors back."""
        os.close(self._read)
        os.close(self._write)
