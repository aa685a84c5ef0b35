"""What a proposer says of itself, for `status`, `/metrics` and capture's commit gate.

At each change of its phase, twice a second, and more often while its quorum gets further.

Keys, beside those of `report.report`: `phase` (`core.Phase`; `ended` when it will not go on), `error` (why it has no
session, or null), `proposer` (its UUID), `epoch` and `timeline` of what it proposes; the LSNs `vcl` and
`commit_lsn` as PostgreSQL writes them; bytes `queue_bytes` (of WAL in memory) and `queue_limit`; `quorum`: whether a
majority of each membership follows and was heard of within `SILENT_SECONDS`. Each of its `safekeepers` has
`shown` and `lag_bytes` (null: not known) besides.

A safekeeper is `shown` as `streaming`, `catching up` (its next byte is not in memory), `silent` (connected, and
says nothing), `joining`, `rebuild` (its WAL was let go: it begins anew) or `away`.
"""

from collections.abc import Mapping
from typing import Any, Final

from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.quorum.proposer.core import Phase, Proposer
from walsender_bridge.quorum.proposer.peer import Peer, PeerState

#: Seconds after which a safekeeper that says nothing counts as hung: it is spoken to five times a second.
SILENT_SECONDS: Final = 3.0
_FOLLOWS: Final = ("streaming", "catching up")


def without_session(phase: str) -> dict[str, Any]:
    """What there is to say without a session: the primary is away, or the proposer has ended."""
    return {"phase": phase, "commit_lsn": format_lsn(0), "quorum": False, "safekeepers": []}


def completed(
    report: dict[str, Any], core: Proposer, heard: Mapping[int, float], now: float
) -> dict[str, Any]:
    """`report` with the keys above. `heard`: when each peer last said something, on the clock of `now`."""
    streaming = core.streaming
    entry = core.history.entries[-1] if core.history else None
    shown = {number: _shown(core, peer, heard, now) for number, peer in core.peers.items()}
    there = {core.peers[number].identity for number, word in shown.items() if word in _FOLLOWS}
    safekeepers = []
    for (number, peer), told in zip(sorted(core.peers.items()), report["safekeepers"], strict=True):
        held = streaming.acked.get(peer.identity) if streaming and peer.identity else None
        lag = None if streaming is None or held is None else streaming.end - held
        safekeepers.append({**told, "shown": shown[number], "lag_bytes": lag})
    return {
        **report,
        "phase": core.phase,
        "proposer": f"{core.node_id.proposer:032x}",
        "epoch": entry.epoch if entry else 0,
        "timeline": entry.timeline if entry else 0,
        "vcl": format_lsn(core.vcl),
        "commit_lsn": format_lsn(streaming.commit_lsn if streaming else 0),
        "queue_bytes": streaming.end - streaming.queue_begin if streaming else 0,
        "queue_limit": core.limits.queue_bytes,
        "quorum": core.phase == Phase.LEADING and core.configuration.has_quorum(there),
        "safekeepers": safekeepers,
    }


def _shown(core: Proposer, peer: Peer, heard: Mapping[int, float], now: float) -> str:
    streaming = core.streaming
    if streaming and peer.identity and peer.identity in streaming.rebuild:
        return "rebuild"
    if peer.state == PeerState.AWAY:
        return "away"
    # Who waits for WAL that is being read is not spoken to meanwhile.
    if peer.reading is None and now - heard.get(peer.number, now) > SILENT_SECONDS:
        return "silent"
    if streaming is None or peer.state != PeerState.STREAMING:
        return "joining"
    return "streaming" if peer.sent_lsn >= streaming.queue_begin else "catching up"
