"""Damaged segments are renamed, with the reason stored in them, and never opened again.

Invariant: no damaged segment is deleted, and every later start still reports it, until the replica has been wiped to be
synchronized with another one.
"""

import contextlib
from pathlib import Path

from walsender_bridge.errors import CorruptError
from walsender_bridge.runtime.durable import sync_folder

REPAIR = "a replica in sync replaces what is damaged; if there is none, see docs/log-lost.md"
_ASIDE = ".corrupt-"
_REPLACED = ".replaced-"
_REASON = "damage.txt"


def keep_aside(folder: Path, error: Exception) -> CorruptError:
    """Rename the folder so that it is not opened again; return the error that names it."""
    target = _renamed(folder, f"{folder.name}{_ASIDE}")
    # The name marks it as damaged; failing to store the reason is not an error.
    with contextlib.suppress(OSError):
        (target / _REASON).write_text(str(error))
    sync_folder(folder.parent)
    what, where = str(error), str(folder)
    if isinstance(error, CorruptError):
        what, where = error.what, error.where
    return CorruptError(f"{what}; renamed to {target.name}", where=where, repair=REPAIR)


def replaced(path: Path) -> None:
    """Rename a damaged segment once more: what was in it comes from another replica."""
    name, aside, _ = path.name.partition(_ASIDE)
    if aside:
        _renamed(path, name + _REPLACED)


def _renamed(folder: Path, name: str) -> Path:
    number = 1
    while (target := folder.with_name(f"{name}{number}")).exists():
        number += 1
    return folder.rename(target)


def damage(path: Path) -> str:
    """The damage of that folder if it was renamed for it; otherwise empty."""
    if _ASIDE not in path.name:
        return ""
    reason = ""
    with contextlib.suppress(OSError, UnicodeDecodeError, IndexError):
        reason = ": " + (path / _REASON).read_text().splitlines()[0]
    return f"segment {path.name} was damaged and has been renamed{reason}"
