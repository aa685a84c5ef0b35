"""How a lake is maintained, for `status`, `/metrics` and `doctor`: what its maintainer last showed."""

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from walsender_bridge.errors import TusklineError
from walsender_bridge.runtime.times import iso_time

if TYPE_CHECKING:
    from spark_consumers.lake.maintenance.state import Summary
    from spark_consumers.lake.manifest.chain import Chain

#: Seconds after which a maintainer that has shown nothing does not work, beside twice its interval.
_SILENT: Final = 120.0


def observe(chain: "Chain") -> "Summary | None":
    """What the lake's maintainer showed last; None if there never was one."""
    from spark_consumers.lake.maintenance.state import read_summary

    with suppress(TusklineError, OSError):
        return read_summary(chain)
    return None


def summary(seen: "Summary | None") -> dict[str, Any] | None:
    """As plain values."""
    if seen is None:
        return None
    return {
        "looked_at": iso_time(seen.looked_at) if seen.looked_at else None,
        "rewritten_at": iso_time(seen.rewritten_at) if seen.rewritten_at else None,
        "accepted": seen.accepted,
        "refused": seen.refused,
        "waiting": seen.waiting,
        "files_before": seen.files_before,
        "files_after": seen.files_after,
        "rewritten_bytes": seen.rewritten_bytes,
        "due_bytes": seen.due_bytes,
        "refusals": [
            {"table": each.table, "reason": each.reason, "at": iso_time(each.at)}
            for each in seen.refusals
        ],
        "error": seen.error or None,
    }


def trouble(seen: "Summary | None", interval: float, now: float | None = None) -> str:
    """Why the lake is not maintained; empty if it is."""
    if seen is None:
        return "no maintainer has looked at the lake yet"
    if seen.error:
        return f"maintenance fails: {seen.error}"
    silent = (time.time() if now is None else now) - seen.at
    if silent > _SILENT + 2 * interval and not seen.waiting:
        return f"the lake's maintainer has not shown anything for {silent:.0f} s"
    return ""
