"""This machine: the folders of the log, the log servers and the safekeepers, and their disk space."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from walsender_bridge.doctor.finding import Finding, Severity
from walsender_bridge.errors import Cause

#: Free bytes below which the parts will stop soon, and below which an administrator should know.
TOO_LITTLE: Final = 256 << 20
LITTLE: Final = 5 << 30


def examine(folders: dict[str, Path]) -> Iterator[Finding]:
    """A finding for each folder, by the key that configures it."""
    for name, folder in folders.items():
        # An unreadable parent counts as missing; the next one shows the cause.
        place = next(each for each in (folder, *folder.parents) if each.is_dir())
        file = next((each for each in (folder, *folder.parents) if each.is_file()), None)
        if file is not None:
            yield Finding(
                "folder",
                name,
                f"{file} is not a folder",
                Severity.ERROR,
                repair="set data_dir to a new or empty folder",
                cause=Cause.CONFIG,
            )
            continue
        if not os.access(place, os.W_OK | os.X_OK):
            yield Finding(
                "folder",
                name,
                f"this user may not write to {place}",
                Severity.ERROR,
                repair="give the folder to this user, or choose another one",
                cause=Cause.CONFIG,
            )
            continue
        yield room(name, place, shutil.disk_usage(place).free)


def laggard_room(
    safekeepers: dict[str, Path], wal_bytes: int | None, free_bytes: int, max_laggard_bytes: int
) -> Iterator[Finding]:
    """Whether each safekeeper's disk can hold the WAL that it keeps for a safekeeper that is away."""
    for name, folder in safekeepers.items():
        place = next(each for each in (folder, *folder.parents) if each.is_dir())
        holds = shutil.disk_usage(place).total - free_bytes
        holds = holds if wal_bytes is None else min(holds, wal_bytes)
        yield laggards_fit(name, holds, max_laggard_bytes)


def laggards_fit(name: str, holds: int, max_laggard_bytes: int) -> Finding:
    """Whether these bytes are enough for the WAL that a safekeeper that is away may miss."""
    check, megabyte = "space for laggards", 1 << 20
    if holds >= max_laggard_bytes:
        return Finding(check, name, f"there is space for {holds // megabyte} MB of WAL")
    return Finding(
        check,
        name,
        f"there is space for {holds // megabyte} MB of WAL, but [safekeepers] max_laggard_bytes keeps up to "
        f"{max_laggard_bytes // megabyte} MB for a safekeeper that is down: once the disk is full, commits wait "
        "until WAL is no longer kept for that safekeeper, which then has to be rebuilt",
        Severity.WARNING,
        repair="lower max_laggard_bytes below that, or give the safekeepers larger disks (wal_bytes)",
        cause=Cause.CONFIG,
    )


def room(name: str, folder: Path, free: int) -> Finding:
    """Whether the free space is enough."""
    what = f"{folder}: {free / (1 << 30):.1f} GB free"
    if free < TOO_LITTLE:
        severity = Severity.ERROR
    elif free < LITTLE:
        severity = Severity.WARNING
    else:
        return Finding("disk space", name, what)
    return Finding(
        "disk space",
        name,
        what,
        severity,
        repair="free space, or choose a folder on another disk",
        cause=Cause.CONFIG,
    )
