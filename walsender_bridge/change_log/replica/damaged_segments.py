"""Damaged segments are kept aside: renamed, with the reason in them, and never opened again.

Invariant: nothing is deleted because it is damaged, and no later start forgets that it was.
"""

import contextlib
from pathlib import Path

from walsender_bridge.errors import CorruptError
from walsender_bridge.runtime.durable import sync_folder

REPAIR = "the replica must be synchronised from another one, or its stream made anew"
_ASIDE = ".corrupt-"
_REASON = "damage.txt"


def keep_aside(folder: Path, error: Exception) -> CorruptError:
    """Give the folder a name that nobody opens; the error says which."""
    number = 1
    while (target := Path(f"{folder}{_ASIDE}{number}")).exists():
        number += 1
    folder.rename(target)
    # The name says that it is damaged; a disk that takes no reason keeps nobody from going on.
    with contextlib.suppress(OSError):
        (target / _REASON).write_text(str(error))
    sync_folder(folder.parent)
    what, where = str(error), str(folder)
    if isinstance(error, CorruptError):
        what, where = error.what, error.where
    return CorruptError(f"{what}; it was kept aside as {target.name}", where=where, repair=REPAIR)


def damage(path: Path) -> str:
    """What was wrong with that folder, if it was kept aside; else nothing."""
    if _ASIDE not in path.name:
        return ""
    reason = ""
    with contextlib.suppress(OSError, UnicodeDecodeError, IndexError):
        reason = ": " + (path / _REASON).read_text().splitlines()[0]
    return f"{path.name} was damaged, and was kept aside{reason}"
