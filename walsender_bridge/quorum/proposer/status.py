"""The status of a proposer (`status_record`), and the page that capture's commit gate reads. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from walsender_bridge.postgres.protocol.lsn import Lsn, format_lsn
from walsender_bridge.quorum.proposer import identities
from walsender_bridge.quorum.proposer.configured_membership import difference
from walsender_bridge.quorum.proposer.core import Phase, Proposer
from walsender_bridge.quorum.proposer.member_changes import Address, MemberChanges
from walsender_bridge.quorum.proposer.peer import PeerState, SafekeeperPeer
from walsender_bridge.quorum.proposer.status_record import (
    ChangeRecord,
    MembershipRecord,
    ProposerStatus,
    ReportedSafekeeper,
    ServerRecord,
    SessionStatus,
)
from walsender_bridge.runtime.commit_page import CommitPage
from walsender_bridge.runtime.error_record import ErrorRecord

#: Seconds without a message after which a safekeeper counts as hung: it is sent heartbeats five times a second.
SILENT_SECONDS: Final = 3.0
_FOLLOWS: Final = ("streaming", "catching up")
_FOLLOWERS: Final = (PeerState.RECOVERING, PeerState.STREAMING)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a proposer's driver knows besides its core. By the peer's number: `addresses`, `faults`, `goals`, `heard`.

    `configured`: the addresses in the configuration. `goals`: the LSN down to which a safekeeper catches up; `stuck`: those
    for which no donor could send the next WAL. `heard`: time of a peer's last message, on the clock of `now`.
    """

    addresses: Sequence[Address]
    faults: Mapping[int, str]
    changes: MemberChanges
    configured: Sequence[Address]
    goals: Mapping[int, Lsn]
    stuck: Collection[int]
    heard: Mapping[int, float]
    now: float


def keeps_up(core: Proposer, number: int) -> bool:
    """Whether a safekeeper has all WAL: its fault is over."""
    peer, streaming = core.peers[number], core.streaming
    follows = peer.state == PeerState.STREAMING
    return follows and streaming is not None and peer.flush_lsn == streaming.end


def without_session(phase: str, error: ErrorRecord | None = None) -> ProposerStatus:
    """The status without a session: the primary is disconnected, or the proposer has ended."""
    return ProposerStatus(
        phase=phase, commit_lsn=format_lsn(0), quorum=False, safekeepers=(), error=error
    )


def commit_page(core: Proposer, *, has_quorum: bool) -> CommitPage:
    """The commit page: what a quorum has of the proposed timeline."""
    return CommitPage(
        core.server.system_id,
        core.history.entries[-1].timeline if core.history else 0,
        core.streaming.commit_lsn if core.streaming else 0,
        "" if has_quorum else "the safekeepers have no quorum",
    )


def of_session(core: Proposer, around: Surroundings) -> SessionStatus:
    """The status of a session."""
    streaming = core.streaming
    entry = core.history.entries[-1] if core.history else None
    safekeepers = {n: _safekeeper(core, peer, around) for n, peer in sorted(core.peers.items())}
    there = {core.peers[n].identity for n, each in safekeepers.items() if each.shown in _FOLLOWS}
    server = core.server
    return SessionStatus(
        term=core.node_id.term,
        server=ServerRecord(server.system_id, server.major, server.segment_size),
        membership=_membership(core, around),
        change=_change(core, around.changes),
        rebuild=_names(streaming.rebuild) if streaming else (),
        restart_lsn=format_lsn(streaming.restart_lsn if streaming else 0),
        end_lsn=format_lsn(streaming.end if streaming else 0),
        phase=core.phase,
        proposer=f"{core.node_id.proposer:032x}",
        election_epoch=entry.election_epoch if entry else 0,
        timeline=entry.timeline if entry else 0,
        vcl=format_lsn(core.vcl),
        commit_lsn=format_lsn(streaming.commit_lsn if streaming else 0),
        queue_bytes=streaming.end - streaming.queue_begin if streaming else 0,
        queue_limit=core.limits.queue_bytes,
        quorum=core.phase == Phase.LEADING and core.configuration.has_quorum(there),
        safekeepers=tuple(safekeepers.values()),
    )


def _names(identities: Collection[int]) -> tuple[str, ...]:
    return tuple(sorted(f"{each:032x}" for each in identities))


def _change(core: Proposer, changes: MemberChanges) -> ChangeRecord:
    # Its reason is updated with its state.
    state = changes.state(core.membership)
    asked_at = changes.request.asked_at if changes.request else None
    return ChangeRecord(state, changes.why, asked_at)


def _membership(core: Proposer, around: Surroundings) -> MembershipRecord:
    configuration = core.configuration
    new = configuration.new_members
    found = {around.addresses[number]: peer.identity for number, peer in core.peers.items()}
    request = around.changes.request
    return MembershipRecord(
        quorum=f"{core.membership.quorum:032x}",
        generation=configuration.generation,
        members=_names(configuration.members),
        new_members=None if new is None else _names(new),
        distrusted=_names(configuration.distrusted),
        settled=core.membership.settled,
        unlike=difference(configuration, around.configured, found, request),
    )


def _safekeeper(core: Proposer, peer: SafekeeperPeer, around: Surroundings) -> ReportedSafekeeper:
    number, streaming = peer.number, core.streaming
    host, port = around.addresses[number]
    held = streaming.acked.get(peer.identity) if streaming and peer.identity else None
    goal = around.goals.get(number)
    return ReportedSafekeeper(
        address=f"{host}:{port}",
        safekeeper=f"{peer.identity:032x}" if peer.identity else None,
        state=peer.state,
        member=peer.identity in core.configuration.everyone,
        flush_lsn=None if held is None else format_lsn(held),
        begin_lsn=format_lsn(peer.begin_lsn) if peer.state in _FOLLOWERS else None,
        catch_up_target_lsn=None if goal is None else format_lsn(goal),
        stuck=number in around.stuck,
        reads_from=peer.source if peer.reading is not None else None,
        fault=around.faults.get(number) or _of_its_disk(core, peer),
        shown=_shown(core, peer, around.heard, around.now),
        lag_bytes=None if streaming is None or held is None else streaming.end - held,
    )


def _of_its_disk(core: Proposer, peer: SafekeeperPeer) -> str | None:
    """Until a proposer is elected, nothing else explains why a connected member does not count toward a majority."""
    distrusted = core.configuration.distrusted
    return identities.has_forgotten(peer.identity) if peer.identity in distrusted else None


def _shown(core: Proposer, peer: SafekeeperPeer, heard: Mapping[int, float], now: float) -> str:
    streaming = core.streaming
    if streaming and peer.identity and peer.identity in streaming.rebuild:
        return "rebuild"
    if peer.state == PeerState.AWAY:
        return "away"
    # A safekeeper that waits for WAL being read gets no messages meanwhile.
    if peer.reading is None and now - heard.get(peer.number, now) > SILENT_SECONDS:
        return "silent"
    if streaming is None or peer.state != PeerState.STREAMING:
        return "joining"
    return "streaming" if peer.sent_lsn >= streaming.queue_begin else "catching up"
