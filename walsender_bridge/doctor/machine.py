"""This machine: the folders of the log, of the log servers and of the safekeepers, and room for them."""

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
        file = next((each for each in (folder, *folder.parents) if each.is_file()), None)
        if file is not None:
            yield Finding(
                "folder",
                name,
                f"{file} is not a folder",
                Severity.ERROR,
                repair="name a folder, new or empty, as data_dir",
                cause=Cause.CONFIG,
            )
            continue
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


def laggard_room(
    safekeepers: dict[str, Path], wal_bytes: int | None, free_bytes: int, max_laggard_bytes: int
) -> Iterator[Finding]:
    """Whether each safekeeper's disk holds the WAL that it is to keep for one that is away."""
    for name, folder in safekeepers.items():
        place = next(each for each in (folder, *folder.parents) if each.is_dir())
        holds = shutil.disk_usage(place).total - free_bytes
        holds = holds if wal_bytes is None else min(holds, wal_bytes)
        yield laggards_fit(name, holds, max_laggard_bytes)


def laggards_fit(name: str, holds: int, max_laggard_bytes: int) -> Finding:
    """Whether so many bytes are enough for what a safekeeper that is away may miss."""
    check, megabyte = "room for laggards", 1 << 20
    if holds >= max_laggard_bytes:
        return Finding(check, name, f"{holds // megabyte} MB of WAL fit")
    return Finding(
        check,
        name,
        f"{holds // megabyte} MB of WAL fit, but [safekeepers] max_laggard_bytes keeps up to "
        f"{max_laggard_bytes // megabyte} MB for a safekeeper that is down: once the disk is full, commits wait "
        "until WAL is no longer kept for that one, and it has to be rebuilt",
        Severity.WARNING,
        repair="lower max_laggard_bytes below what fits, or give the safekeepers larger disks (wal_bytes)",
        cause=Cause.CONFIG,
    )


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
