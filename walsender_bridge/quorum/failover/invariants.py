"""What must hold of the next step of a failover. Pure.

A run checks it before the step begins: a promotion cannot be undone.
"""

from typing import NamedTuple

from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.quorum.failover.plan import FailoverQuorum, FailoverStep, PromotionCandidate
from walsender_bridge.runtime import invariants
from walsender_bridge.runtime.invariants import Invariant


class _Next(NamedTuple):
    step: FailoverStep
    candidate: PromotionCandidate
    quorum: FailoverQuorum

    @property
    def promotes(self) -> bool:
        return self.step == FailoverStep.PROMOTE


def check_invariants(
    step: FailoverStep, candidate: PromotionCandidate, quorum: FailoverQuorum
) -> None:
    """`step`: the step that is about to be performed on the observed state. Raises `InvariantError`."""
    invariants.check("failover", INVARIANTS, _Next(step, candidate, quorum), _describe)


def _describe(found: _Next) -> str:
    candidate, quorum = found.candidate, found.quorum
    known = {"VCL": quorum.vcl, "equal to": quorum.equal_to, "committed": quorum.committed}
    positions = [
        f"{name} {'unknown' if at is None else format_lsn(at)}" for name, at in known.items()
    ]
    return (
        f"next is {found.step.name}; candidate on timeline {candidate.lineage.timeline},"
        f" {'in recovery' if candidate.in_recovery else 'a primary'}, end {format_lsn(candidate.end_lsn)}, replayed"
        f" {format_lsn(candidate.replay_lsn)}; safekeepers on timeline {quorum.timeline}, fenced {quorum.fenced},"
        f" {', '.join(positions)}"
    )


def _has_replayed_all(found: _Next) -> bool:
    vcl, candidate = found.quorum.vcl, found.candidate
    return vcl is not None and min(candidate.replay_lsn, candidate.end_lsn) >= vcl


def _own_wal_is_committed(found: _Next) -> bool:
    """A candidate that still streams from the old server has more WAL; it is proposed when the candidate is attached."""
    committed, vcl = found.quorum.committed, found.quorum.vcl
    wanted = found.candidate.end_lsn if found.candidate.follows else vcl
    return committed is not None and wanted is not None and committed >= wanted


def _attaches_what_is_newer(found: _Next) -> bool:
    timeline = found.candidate.lineage.timeline
    return timeline > max(found.quorum.timeline, found.quorum.fenced)


INVARIANTS: tuple[Invariant[_Next], ...] = (
    Invariant(
        "a_primary_is_only_attached",
        "a promotion is not taken back",
        lambda found: (
            found.candidate.in_recovery or found.step in {FailoverStep.ATTACH, FailoverStep.DONE}
        ),
    ),
    Invariant(
        "promoted_with_all_that_may_be_committed",
        "no acknowledged commit is missing",
        lambda found: not found.promotes or _has_replayed_all(found),
    ),
    Invariant(
        "promoted_with_the_bytes_of_the_quorum",
        "its WAL up to VCL is the quorum's",
        lambda found: not found.promotes or found.quorum.equal_to is not None,
    ),
    Invariant(
        "promoted_with_its_own_wal_committed",
        "a quorum has all of its WAL",
        lambda found: not found.promotes or _own_wal_is_committed(found),
    ),
    Invariant(
        "promoted_guarded",
        "from its first moment on its commits wait for the quorum",
        lambda found: not found.promotes or found.candidate.guarded,
    ),
    Invariant(
        "attached_on_a_newer_timeline",
        "nothing is acknowledged on a fenced timeline",
        lambda found: found.step != FailoverStep.ATTACH or _attaches_what_is_newer(found),
    ),
)
