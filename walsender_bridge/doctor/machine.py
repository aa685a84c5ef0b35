"""This machine: the folders of the log and of the keepers, and room for them."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.errors import Cause

#: Bytes free below which nothing works for long, and below which somebody should know.
TOO_LITTLE: Final = 256 << 20
LITTLE: Final = 5 << 30


def examine(folders: dict[str, Path]) -> Iterator[Finding]:
    """A finding for each folder, by the key that configures it."""
    for name, folder in folders.items():
        # An unreadable parent is as good as none: the next one tells why.
        place = next(each for each in (folder, *folder.parents) if each.is_dir())
        if not os.access(place, os.W_OK | os.X_OK):
            yield Finding(
                "folder",
                name,
                f"{place} cannot be written by this user",
                Severity.ERROR,
                repair="give this user the folder, or name another",
                cause=Cause.CONFIG,
            )
            continue
        yield room(name, folder, shutil.disk_usage(place).free)


def room(name: str, folder: Path, free: int) -> Finding:
    """Whether these free bytes are enough."""
    what = f"{folder}: {free / (1 << 30):.1f} GB free"
    if free < TOO_LITTLE:
        severity = Severity.ERROR
    elif free < LITTLE:
        severity = Severity.WARNING
    else:
        return Finding("disk room", name, what)
    return Finding(
        "disk room",
        name,
        what,
        severity,
        repair="make room, or name a folder on another disk",
        cause=Cause.CONFIG,
    )
