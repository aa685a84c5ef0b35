"""A lock on a file, which ends with its process: data that belong to one process at a time."""

import fcntl
import os
from pathlib import Path

from walsender_bridge.errors import TusklineError


def lock(path: Path, taken: TusklineError) -> int:
    """Create the file if necessary, and lock it until the returned descriptor is closed.

    Raises `taken` if it cannot be locked, `OSError` if it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise taken from None
    return descriptor
