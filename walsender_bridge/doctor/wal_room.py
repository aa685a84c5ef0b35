"""Whether a server's disk can hold the WAL that `max_slot_wal_keep_size` lets its slots retain (13 and later).

SQL does not show free space, so it is known only for a server on this machine whose folder this user may read.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from walsender_bridge.doctor.finding import Finding, Severity

CHECK: Final = "space for slots"
_MEGABYTE: Final = 1 << 20


def free_bytes(disk: dict[str, Any]) -> int | None:
    """The free space of the server; `disk` as in the facts. None: it is elsewhere, or this user may not see it."""
    if not disk["local"] or not disk["folder"]:
        return None
    folder = Path(disk["folder"])
    for place in (folder / "pg_wal", folder):  # pg_wal is often on its own disk
        try:
            found = os.statvfs(place)
        except OSError:
            continue
        return found.f_bavail * found.f_frsize
    return None


def evaluate(limit: int | None, disk: dict[str, Any], where: str) -> Iterator[Finding]:
    """Nothing if there is no limit, or the free space is unknown. `limit`: the setting, in MB."""
    free = disk["free"]
    if limit is None or limit < 0 or free is None:
        return
    kept = int(disk["kept"] or 0)
    more = max(0, limit * _MEGABYTE - kept)
    if more <= free:
        yield Finding(
            CHECK, where, f"{free // _MEGABYTE} MB are free, and slots may retain {limit} MB"
        )
        return
    yield Finding(
        CHECK,
        where,
        f"slots may retain {limit} MB of WAL (max_slot_wal_keep_size) and retain {kept // _MEGABYTE} MB now, but only"
        f" {free // _MEGABYTE} MB are free: the disk becomes full, which stops the server, before a slot is invalidated",
        Severity.WARNING,
        repair=f"set max_slot_wal_keep_size below {(kept + free) // _MEGABYTE}MB there and reload, or enlarge its disk",
    )
