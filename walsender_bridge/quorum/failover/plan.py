"""The next step of a failover without loss, as a function of the observed state. Pure.

    ELECT ─▶ GUARD ─▶ COMPARE ─▶ FOLLOW ─▶ RECEIVE ─▶ COMMIT ─▶ REPLAY ─▶ PROMOTE ─▶ ATTACH ─▶ DONE

ELECT wins an election without a primary. Each vote persists the *fence*: the current timeline is refused from then
on, so the old primary's commits hang even if this process dies. A quorum reaches VCL. The candidate, a standby,
must have the same bytes below VCL; it receives missing WAL from a safekeeper, and its own WAL beyond VCL is
proposed and committed. Then it is promoted and attached: the quorum's log continues on the new timeline, which
lifts the fence. GUARD ensures that its commits wait for the quorum from the moment that it is a primary.

Invariant: a candidate is promoted only when it has replayed everything that may be committed (VCL, of an election
whose fence stands), its WAL up to there is the quorum's, and a quorum has all of its own. So no acknowledged commit
is missing, nothing can be acknowledged on the old timeline later, and the attachment cannot be refused.

Resuming: `next_step` reads the state of servers and safekeepers, never the record of an earlier run. After a run that
died anywhere, the next one holds another election, which undoes nothing, and repeats only what is still missing. A
candidate that is already promoted needs only ATTACH. `plan` applies the same function to each step's expected outcome.

This module has no clock. LSNs are bytes.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from walsender_bridge.errors import (
    DivergedError,
    FencedError,
    NotSupportedError,
    ServerSettingError,
)
from walsender_bridge.postgres.protocol.lsn import Lsn, WalPosition, format_lsn
from walsender_bridge.quorum.proposer.effects import Lineage


class FailoverStep(StrEnum):
    """See the module; in this order, each step only if it is needed."""

    ELECT = "elect a proposer without a primary; the votes fence the current timeline"
    GUARD = "make the candidate's commits wait for the quorum once it is a primary"
    COMPARE = "compare the candidate's WAL with the quorum's"
    FOLLOW = "make the candidate stream from safekeepers only"
    RECEIVE = "wait until the candidate has all that may be committed"
    COMMIT = "propose the candidate's WAL beyond that, and wait until a quorum commits it"
    REPLAY = "wait until the candidate has replayed it"
    PROMOTE = "promote the candidate"
    ATTACH = "attach the new timeline to the safekeepers, which lifts the fence"
    DONE = "the safekeepers follow the promoted server"


@dataclass(frozen=True, slots=True)
class PromotionCandidate:
    """The server that becomes, or already is, the primary. `end_lsn`: the end of its durable WAL.

    `follows`: it streams from a safekeeper or from no server, and is not configured for another one; None: its major
    (11, 12) changes `primary_conninfo` only with a restart. `restores`: it has a `restore_command`. `guarded`: a commit
    on it waits for the proposer. `paused`: its replay is paused.
    """

    in_recovery: bool
    lineage: Lineage
    end_lsn: Lsn
    replay_lsn: Lsn
    guarded: bool = False
    follows: bool | None = False
    restores: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class FailoverQuorum:
    """The safekeepers. `timeline`: a majority's logs are on it; `fenced`: the greatest that a failover fenced, or 0.

    `vcl`: of the election that this run has won; None before. `equal_to`: this run found the candidate's bytes below it
    equal to the quorum's. `committed`: the LSN up to which the candidate's own WAL was committed in this run.
    """

    timeline: int
    fenced: int = 0
    vcl: Lsn | None = None
    equal_to: Lsn | None = None
    committed: Lsn | None = None


def next_step(
    candidate: PromotionCandidate, quorum: FailoverQuorum, *, trusts_restore: bool = False
) -> FailoverStep:
    """The step to perform now. `trusts_restore`: the operator asserts that `restore_command` reads the quorum's WAL only.

    Raises `DivergedError`, `FencedError`, `ServerSettingError`, `NotSupportedError`.
    """
    if not candidate.in_recovery:
        return _attached(candidate, quorum)
    if candidate.lineage.timeline > quorum.timeline:
        raise DivergedError(
            f"the standby is on timeline {candidate.lineage.timeline}, the safekeepers are on {quorum.timeline}",
            repair="choose a standby of the server that the safekeepers follow",
        )
    if candidate.restores and not trusts_restore:
        raise ServerSettingError(
            "the standby has a restore_command, which could restore WAL that no quorum has",
            repair="remove it, or confirm that it reads the safekeepers' WAL only",
        )
    if candidate.paused:
        raise ServerSettingError(
            "the standby's replay is paused", repair="SELECT pg_wal_replay_resume()"
        )
    if quorum.vcl is None:
        return FailoverStep.ELECT
    if not candidate.guarded:
        return FailoverStep.GUARD
    if quorum.equal_to is None:
        return FailoverStep.COMPARE
    if candidate.follows is False:
        return FailoverStep.FOLLOW
    if candidate.end_lsn < quorum.vcl:
        if candidate.follows is None:
            raise NotSupportedError(
                f"the standby ends at {format_lsn(candidate.end_lsn)}, the quorum at {format_lsn(quorum.vcl)}, and"
                " its major takes another primary_conninfo only with a restart",
                repair="point it at a safekeeper's WAL server, restart it, and repeat the failover, which continues from here",
            )
        return FailoverStep.RECEIVE
    # A candidate that still streams from the old server keeps growing; WAL beyond this is proposed when it is attached.
    wanted = candidate.end_lsn if candidate.follows else quorum.vcl
    if quorum.committed is None or quorum.committed < wanted:
        return FailoverStep.COMMIT
    return FailoverStep.REPLAY if candidate.replay_lsn < quorum.vcl else FailoverStep.PROMOTE


def _attached(candidate: PromotionCandidate, quorum: FailoverQuorum) -> FailoverStep:
    """The step for a candidate that is already a primary."""
    timeline = candidate.lineage.timeline
    if timeline < quorum.timeline:
        raise DivergedError(
            f"this server is a primary on timeline {timeline}, the safekeepers are on {quorum.timeline}",
            repair="bring it back with pg_rewind; choose a standby of the server that the safekeepers follow",
        )
    if timeline <= quorum.fenced:
        raise FencedError(
            f"this server is a primary on timeline {timeline}, which a failover has fenced",
            repair="choose a standby, or abort the failover",
        )
    return FailoverStep.DONE if timeline == quorum.timeline else FailoverStep.ATTACH


def after(
    step: FailoverStep, candidate: PromotionCandidate, quorum: FailoverQuorum
) -> tuple[PromotionCandidate, FailoverQuorum]:
    """The state expected after a step succeeds, as far as it is predictable."""
    vcl = quorum.vcl or 0
    match step:
        case FailoverStep.ELECT:
            assert quorum.vcl is not None, "a plan requires an expected VCL"
            return candidate, replace(quorum, fenced=quorum.timeline)
        case FailoverStep.GUARD:
            return replace(candidate, guarded=True), quorum
        case FailoverStep.COMPARE:
            return candidate, replace(quorum, equal_to=min(candidate.end_lsn, vcl))
        case FailoverStep.FOLLOW:
            return replace(candidate, follows=True), quorum
        case FailoverStep.RECEIVE:
            return replace(candidate, end_lsn=vcl), quorum
        case FailoverStep.COMMIT:
            return candidate, replace(quorum, committed=candidate.end_lsn)
        case FailoverStep.REPLAY:
            return replace(candidate, replay_lsn=candidate.end_lsn), quorum
        case FailoverStep.PROMOTE:
            old = candidate.lineage
            switches = (*old.switches, WalPosition(old.timeline, candidate.end_lsn))
            lineage = Lineage(quorum.timeline + 1, switches)
            return replace(candidate, in_recovery=False, lineage=lineage), quorum
        case FailoverStep.ATTACH:
            return candidate, replace(quorum, timeline=candidate.lineage.timeline, fenced=0)
        case FailoverStep.DONE:
            return candidate, quorum


def plan(
    candidate: PromotionCandidate,
    quorum: FailoverQuorum,
    expected_vcl: Lsn,
    *,
    trusts_restore: bool = False,
) -> list[FailoverStep]:
    """The steps from here to DONE, assuming that each succeeds. Raises what `next_step` raises."""
    steps: list[FailoverStep] = []
    while FailoverStep.DONE not in steps:
        step = next_step(candidate, quorum, trusts_restore=trusts_restore)
        steps.append(step)
        if step == FailoverStep.ELECT:
            quorum = replace(quorum, vcl=expected_vcl)
        candidate, quorum = after(step, candidate, quorum)
    return steps
