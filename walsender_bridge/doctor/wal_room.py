"""Whether a server's disk holds the WAL that `max_slot_wal_keep_size` lets its slots keep (13 and later).

SQL does not show free space, so it is known for a server of this machine only, whose folder this user may look at.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from walsender_bridge.doctor.finding import Finding, Severity

CHECK: Final = "room for slots"
_MEGABYTE: Final = 1 << 20


def free_bytes(disk: dict[str, Any]) -> int | None:
    """What the server may still write; `disk` as in the facts. None: it is elsewhere, or not this user's to see."""
    if not disk["local"] or not disk["folder"]:
        return None
    folder = Path(disk["folder"])
    for place in (folder / "pg_wal", folder):  # pg_wal is often a disk of its own
        try:
            found = os.statvfs(place)
        except OSError:
            continue
        return found.f_bavail * found.f_frsize
    return None


def evaluate(limit: int | None, disk: dict[str, Any], where: str) -> Iterator[Finding]:
    """Nothing where there is no limit, or the free space is not known. `limit`: the setting, in MB."""
    free = disk["free"]
    if limit is None or limit < 0 or free is None:
        return
    kept = int(disk["kept"] or 0)
    more = max(0, limit * _MEGABYTE - kept)
    if more <= free:
        yield Finding(CHECK, where, f"{free // _MEGABYTE} MB are free, slots may keep {limit} MB")
        return
    yield Finding(
        CHECK,
        where,
        f"slots may keep {limit} MB of WAL (max_slot_wal_keep_size) and keep {kept // _MEGABYTE} MB now, but only"
        f" {free // _MEGABYTE} MB are free: the disk is full before a slot is given up, and then the server stops",
        Severity.WARNING,
        repair=f"set max_slot_wal_keep_size below {(kept + free) // _MEGABYTE}MB there and reload, or give it more disk",
    )
