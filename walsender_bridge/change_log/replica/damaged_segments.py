"""Damaged segments are renamed, with the reason stored in them, and never opened again.

Invariant: no damaged segment is deleted, and every later start still reports it.
"""

import contextlib
from pathlib import Path

from walsender_bridge.errors import CorruptError
from walsender_bridge.runtime.durable import sync_folder

REPAIR = "synchronize the replica from another one, or create the stream again (docs/log-lost.md)"
_ASIDE = ".corrupt-"
_REASON = "damage.txt"


def keep_aside(folder: Path, error: Exception) -> CorruptError:
    """Rename the folder so that it is not opened again; return the error that names it."""
    number = 1
    while (target := Path(f"{folder}{_ASIDE}{number}")).exists():
        number += 1
    folder.rename(target)
    # The name marks it as damaged; failing to store the reason is not an error.
    with contextlib.suppress(OSError):
        (target / _REASON).write_text(str(error))
    sync_folder(folder.parent)
    what, where = str(error), str(folder)
    if isinstance(error, CorruptError):
        what, where = error.what, error.where
    return CorruptError(f"{what}; renamed to {target.name}", where=where, repair=REPAIR)


def damage(path: Path) -> str:
    """The damage of that folder if it was renamed for it; otherwise empty."""
    if _ASIDE not in path.name:
        return ""
    reason = ""
    with contextlib.suppress(OSError, UnicodeDecodeError, IndexError):
        reason = ": " + (path / _REASON).read_text().splitlines()[0]
    return f"segment {path.name} was damaged and has been renamed{reason}"
