"""What an operator sees of the commit gates: who has what, what waits for whom, who was left out. Pure."""

from collections.abc import Iterator
from typing import Any, Final

from walsender_bridge.postgres.protocol.lsn import format_lsn

#: Seconds without anything passing, while something waits, after which that is worth a word.
STUCK: Final = 5.0


def ill(source: str, gate: dict[str, Any] | None, now: float) -> Iterator[str]:
    """What is not as it should be. `gate`: see `capture.status`; `now`: seconds since the Unix epoch."""
    if not gate:
        return
    since = gate["stuck_since"]
    if since is not None and now - since > STUCK:
        yield (
            f"the commit gate of {source} has been closed for {now - since:.0f} s, and consumers get nothing new: "
            + "; ".join(gate["holding"])
        )
    if gate["open"]:
        yield (
            f"the commit gate of {source} is open: no candidate is left to wait for, and consumers may have what "
            "the next primary lacks"
        )
    for each in gate["candidates"]:
        if each["standing"] == "degraded":
            yield (
                f"candidate {each['slot']} is left out of the commit gate of {source}: consumers may have what it "
                f"lacks ({each['away'] or 'its standby is too far behind'})"
            )


def rows(source: str, gate: dict[str, Any] | None, server_lsn: int) -> list[dict[str, Any]]:
    """A row for each that the gate looks at; `server_lsn`: the server's durable end of WAL, 0 if that is not known."""
    if not gate:
        return []
    held = [
        (each["slot"], each["standing"], each["flush_lsn"], each["away"])
        for each in gate["candidates"]
    ]
    if gate["quorum_lsn"] is not None:
        held.insert(0, ("safekeepers", "counted", gate["quorum_lsn"], ""))
    return [
        {
            "source": source,
            "candidate": name,
            "standing": standing,
            "lsn": format_lsn(lsn) if lsn else None,
            "lag_bytes": max(0, server_lsn - lsn) if lsn and server_lsn else None,
            "why": why or None,
        }
        for name, standing, lsn, why in held
    ]
