"""What the lake's writer is doing with its tables, for those who look from outside.

`<lake>/_tuskline/status.json` is replaced whole. It says only what is under way and would be lost with the
writer; what is durable is in the chain. `table_rows` puts the two together.
"""

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any

from spark_consumers.lake.manifest.chain import Chain, Manifest
from walsender_bridge.runtime import status_file

#: After which a status that is not renewed while something is copied is of a writer that is gone, in seconds.
STALE_AFTER = 15.0


def write_status(chain: Chain, head: Manifest, copying: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the status, if the disk takes it. `copying`: how far each table's copy is, by name."""
    path = chain.root / "_tuskline" / "status.json"
    record = {"at": time.time(), "term": head.term, "epoch": head.epoch, "copying": copying}
    with contextlib.suppress(OSError):
        status_file.replace(path, json.dumps(record).encode())


def read_status(chain: Chain) -> dict[str, Any]:
    """The status that was written last; empty if there is none. It is no promise, so damage is none either."""
    try:
        record = json.loads((chain.root / "_tuskline" / "status.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def copying_now(head: Manifest, status: Mapping[str, Any], now: float) -> dict[str, Any]:
    """The progress of copies, by table, if the head's writer reported it recently (`initial_copy.Progress`)."""
    fresh = now - float(status.get("at", 0.0)) < STALE_AFTER and status.get("term") == head.term
    return dict(status.get("copying", {})) if fresh else {}


def table_rows(head: Manifest, status: Mapping[str, Any], now: float) -> list[dict[str, Any]]:
    """A record for each table that is in the lake, is copied, or could not be copied.

    `state` is that of `table_version`, or `copying`, `copied`, `failed` for a table that is not in the lake
    yet. `quarantined_rows`: quarantined rows that are not skipped, beside `rows`; `skipped_rows`: those that are.
    `copy`: how far its copy is (`initial_copy.Progress`), if one runs.
    """
    copying = copying_now(head, status, now)
    rows = []
    for name in sorted({*head.tables, *head.copies, *head.set_aside, *copying}):
        table = head.tables.get(name)
        copy = copying.get(name)
        if table is not None:
            state = table.state
        elif name in head.copies:
            state = "copied"
        elif copy is not None:
            state = "copying"
        else:
            state = "failed"
        rows.append(
            {
                "table": name,
                "state": state,
                "rows": table.rows if table is not None else None,
                "quarantined_rows": table.quarantined_rows - table.skipped_rows
                if table is not None
                else None,
                "skipped_rows": table.skipped_rows if table is not None else None,
                "as_of": (table.as_of or head.epoch) if table is not None else None,
                "resync": _resync(name, table.resync if table else "", head, copy),
                "reason": _waits_for(copy)
                or head.set_aside.get(name)
                or (table.reason if table is not None else ""),
                "copy": copy,
            }
        )
    return rows


def _waits_for(copy: Mapping[str, Any] | None) -> str:
    """What a copy waits for before it begins; a driver of an earlier version does not say."""
    waits_for = (copy or {}).get("waits_for", "")
    return f"its copy waits for {waits_for}" if waits_for else ""


def _resync(name: str, reason: str, head: Manifest, copy: object) -> str:
    """How far the copy that will take the table's place is."""
    if not reason:
        return ""
    if name in head.copies:
        return "copied"
    return "copying" if copy is not None else "waiting"
