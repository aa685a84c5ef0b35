"""Whether a path still leads to the file that a process has open: one that was removed or moved is written without an error."""

import os
from pathlib import Path


def leads_to(path: Path, opened: os.stat_result) -> bool:
    """Whether the file at the path is the opened one; False if there is none. Raises `OSError` if that cannot be found out."""
    try:
        return os.path.samestat(path.stat(), opened)
    except (FileNotFoundError, NotADirectoryError):
        return False
