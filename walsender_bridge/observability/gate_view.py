"""The commit gates as an operator sees them: the position of each candidate, and the problems. Pure."""

from collections.abc import Iterator
from typing import Any, Final

from walsender_bridge.capture.status_record import GateStatus
from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn

#: Seconds after which it is a problem that transactions wait and none passes.
STUCK: Final = 5.0


def problems(source: str, gate: GateStatus | None, now: float) -> Iterator[str]:
    """The problems of a gate, if there is one. `now`: seconds since the Unix epoch."""
    if gate is None:
        return
    since = gate.stuck_since
    if since is not None and now - since > STUCK:
        yield (
            f"the commit gate of {source} has been closed for {now - since:.0f} s; consumers get no new transactions: "
            + "; ".join(gate.holding)
        )
    if gate.open:
        yield (
            f"the commit gate of {source} is open: no candidate is left to wait for, so consumers may get "
            "transactions that the next primary lacks"
        )
    for each in gate.candidates:
        if each.standing == "degraded":
            yield (
                f"the commit gate of {source} no longer waits for candidate {each.slot}: consumers may get "
                f"transactions that it lacks ({each.away or 'its standby is too far behind'})"
            )


def rows(source: str, gate: GateStatus | None, server_lsn: Lsn) -> list[dict[str, Any]]:
    """A row for each candidate, and for the safekeepers. `server_lsn`: the server's flush LSN, 0 if unknown."""
    if gate is None:
        return []
    held = [(each.slot, each.standing, each.flush_lsn, each.away) for each in gate.candidates]
    if gate.quorum_lsn is not None:
        held.insert(0, ("safekeepers", "counted", gate.quorum_lsn, ""))
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
