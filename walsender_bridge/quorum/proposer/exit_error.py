"""The reason of a proposer's end, as an error with a hint."""

from walsender_bridge.errors import (
    CorruptError,
    DivergedError,
    FencedError,
    OutvotedError,
    TusklineError,
)
from walsender_bridge.quorum.proposer.effects import Stop, StopReason

_ERRORS: dict[StopReason, type[TusklineError]] = {
    StopReason.DISPLACED: FencedError,
    StopReason.OUTVOTED: OutvotedError,
    StopReason.FENCED: FencedError,
    StopReason.BROKEN: CorruptError,
}
_REPAIRS = {
    StopReason.DISPLACED: "only one proposer may run: stop this one, or the other",
    StopReason.OUTVOTED: "no action is needed: it campaigns again in a higher term",
    StopReason.FENCED: "attach the server that was promoted, or abort the failover",
    StopReason.OTHER_SERVER: "give each cluster its own safekeepers",
    StopReason.OTHER_QUORUM: "start the safekeepers of this server's quorum; docs/quorum-lost.md if they are gone",
    StopReason.AHEAD: "rebuild this server from a base backup and the safekeepers' WAL",
    StopReason.OTHER_HISTORY: "attach the server whose timeline the safekeepers hold",
    StopReason.OTHER_BYTES: "attach the server whose WAL the safekeepers hold",
    StopReason.REMOVED: "start every safekeeper: one may have more WAL. Otherwise tuskline quorum release, and new"
    " safekeepers (docs/quorum-lost.md)",
    StopReason.BROKEN: "keep the safekeepers' data directories, and compare their WAL",
}


def ended(stop: Stop, where: str) -> TusklineError:
    """The error of a `Stop`; `where` is the primary."""
    kind = _ERRORS.get(stop.reason, DivergedError)
    by = f" ({stop.by})" if stop.by else ""
    return kind(
        f"the proposer stopped, {stop.reason}: {stop.detail}{by}",
        where=where,
        repair=_REPAIRS[stop.reason],
    )
