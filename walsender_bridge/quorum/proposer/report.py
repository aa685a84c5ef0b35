"""What a proposer says of its quorum: the membership, each safekeeper, a change under way. JSON values; pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, Final

from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.quorum.proposer import identities
from walsender_bridge.quorum.proposer.configured_membership import difference
from walsender_bridge.quorum.proposer.core import Proposer
from walsender_bridge.quorum.proposer.member_changes import Address, MemberChanges
from walsender_bridge.quorum.proposer.peer import Peer, PeerState

_TAKEN: Final = (PeerState.TAKING, PeerState.STREAMING)


def keeps_up(core: Proposer, number: int) -> bool:
    """Whether a safekeeper has all there is: nothing is wrong with it any more."""
    peer, streaming = core.peers[number], core.streaming
    follows = peer.state == PeerState.STREAMING
    return follows and streaming is not None and peer.flush_lsn == streaming.end


def report(
    core: Proposer,
    addresses: Sequence[Address],
    faults: Mapping[int, str],
    changes: MemberChanges,
    configured: Sequence[Address],
    goals: Mapping[int, int] = MappingProxyType({}),
    stuck: Collection[int] = (),
) -> dict[str, Any]:
    """`addresses` and `faults` by the peer's number; identities in hexadecimal, LSNs as PostgreSQL writes them.

    `begin_lsn`, of each safekeeper, is where its WAL began when it told last. `brought_to`: down to there, `goals`, it is
    being brought older WAL (null: it wants none that there is); `stuck`: nobody could lend the next of it.

    `configured`: the addresses that the operator wrote down.
    """
    configuration, streaming = core.configuration, core.streaming
    new = configuration.new_members
    safekeepers = []
    found = {addresses[number]: peer.identity for number, peer in core.peers.items()}
    for number, peer in sorted(core.peers.items()):
        host, port = addresses[number]
        held = streaming.acked.get(peer.identity) if streaming and peer.identity else None
        safekeepers.append(
            {
                "address": f"{host}:{port}",
                "safekeeper": f"{peer.identity:032x}" if peer.identity else None,
                "state": peer.state,
                "member": peer.identity in configuration.everyone,
                "flush_lsn": None if held is None else format_lsn(held),
                "begin_lsn": format_lsn(peer.begin_lsn) if peer.state in _TAKEN else None,
                "brought_to": format_lsn(goals[number]) if number in goals else None,
                "stuck": number in stuck,
                "reads_from": peer.source if peer.reading is not None else None,
                "fault": faults.get(number) or _of_its_disk(core, peer),
            }
        )
    return {
        "term": core.node_id.term,
        "server": asdict(core.server),
        "membership": {
            "quorum": f"{core.membership.quorum:032x}",
            "generation": configuration.generation,
            "members": sorted(f"{member:032x}" for member in configuration.members),
            "new_members": None if new is None else sorted(f"{member:032x}" for member in new),
            "distrusted": sorted(f"{member:032x}" for member in configuration.distrusted),
            "settled": core.membership.settled,
            "unlike": difference(configuration, configured, found, changes.request),
        },
        "change": {
            "state": changes.state(core.membership),
            "why": changes.why,
            "asked_at": changes.request.asked_at if changes.request else None,
        },
        "rebuild": sorted(f"{each:032x}" for each in streaming.rebuild) if streaming else [],
        "restart_lsn": format_lsn(streaming.restart_lsn if streaming else 0),
        "end_lsn": format_lsn(streaming.end if streaming else 0),
        "safekeepers": safekeepers,
    }


def _of_its_disk(core: Proposer, peer: Peer) -> str | None:
    """Until a proposer is elected, nothing else says why a connected member makes no majority."""
    distrusted = core.configuration.distrusted
    return identities.has_forgotten(peer.identity) if peer.identity in distrusted else None
