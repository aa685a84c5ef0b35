"""Wakes a poll loop from other threads and from signal handlers."""

import contextlib
import os
import threading


class Waker:
    """A descriptor to poll that other threads, and signals, make readable.

    The loop that polls may end and close it while another thread is about to wake it: nothing is then written, least
    of all to a file that has been given the same number.
    """

    def __init__(self) -> None:
        # Reentrant: a signal handler may run while its own thread holds it.
        self._lock = threading.RLock()
        self._closed = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def fileno(self) -> int:
        """What to poll for reading."""
        return self._read

    def wake(self) -> None:
        """Make it readable; nothing if it is closed."""
        with self._lock, contextlib.suppress(BlockingIOError):  # full: it is readable
            if not self._closed:
                os.write(self._write, b"\0")

    def clear(self) -> None:
        """Make it quiet; call before looking for what the wakers left."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 4096):
                pass

    def close(self) -> None:
        """Give the descriptors back."""
        with self._lock:
            self._closed = True
            os.close(self._read)
            os.close(self._write)
