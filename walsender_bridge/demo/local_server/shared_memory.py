"""What a postmaster that was killed leaves in the system: the segment of System V shared memory that marks its folder.

The next start in the same folder takes it away. A folder that is deleted instead has no next start, and the system
keeps a few thousand such segments.
"""

import ctypes
from pathlib import Path

_REMOVE = 0  # IPC_RMID


def release(data_dir: Path) -> None:
    """Remove the segment that `data_dir`'s postmaster.pid names, if it still is that one. Nothing of it runs."""
    try:
        words = (data_dir / "postmaster.pid").read_text().splitlines()[6].split()
        key, number = int(words[0]), int(words[1])
    except (OSError, ValueError, IndexError):
        return  # The server ended by itself, or never came so far.
    system = ctypes.CDLL(None)
    # A number may be another's by now; the key comes from the folder's inode.
    if system.shmget(ctypes.c_int(key), ctypes.c_size_t(0), 0) == number:
        system.shmctl(number, _REMOVE, None)
