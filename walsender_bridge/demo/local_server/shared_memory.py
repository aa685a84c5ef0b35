"""The System V shared memory segment of its data folder, which a killed postmaster leaves behind.

The next start in the same folder removes it. If the folder is deleted instead, the segment remains; the system has room for
a few thousand of them.
"""

import ctypes
from pathlib import Path

_REMOVE = 0  # IPC_RMID


def release(data_dir: Path) -> None:
    """Remove the segment that `data_dir`'s postmaster.pid names, if it still is the same one. The server is not running."""
    try:
        fields = (data_dir / "postmaster.pid").read_text().splitlines()[6].split()
        key, number = int(fields[0]), int(fields[1])
    except (OSError, ValueError, IndexError):
        return  # The server ended by itself, or never created one.
    system = ctypes.CDLL(None)
    # The id may have been reused; the key is derived from the folder's inode.
    if system.shmget(ctypes.c_int(key), ctypes.c_size_t(0), 0) == number:
        system.shmctl(number, _REMOVE, None)
