"""Returns freed memory to the system in processes that receive messages of any length.

Flight holds a message whole before anything of ours can see its length; pyarrow has no option that limits it. gRPC frees it in
pieces, and glibc keeps these for the thread that took them: each request that was refused for its length used to leave
the process larger, for good, until every thread had its share. A row of nearly 1 GB does the same.
"""

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Final

#: Seconds between two trims. Memory in use at one is returned at a later one.
SECONDS: Final = 5.0


def start() -> None:
    """Start a thread that returns memory periodically. Does nothing without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        arguments = (lambda: trim(ctypes.c_size_t(0)),)
        threading.Thread(target=_run, args=arguments, name="freed-memory", daemon=True).start()


def _run(trim: Callable[[], object]) -> None:
    while True:
        time.sleep(SECONDS)
        trim()
