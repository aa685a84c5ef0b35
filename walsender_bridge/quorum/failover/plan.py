"""A failover without loss, step by step: what is to be done next, as a function of what is seen. Pure.

    ELECT ─▶ GUARD ─▶ COMPARE ─▶ FOLLOW ─▶ RECEIVE ─▶ COMMIT ─▶ REPLAY ─▶ PROMOTE ─▶ ATTACH ─▶ DONE

ELECT wins a vote without a primary. Each vote persists the *fence*: the timeline that stands is refused from then
on, so the old primary's commits hang, whatever becomes of this process. A quorum reaches VCL. The candidate, a
standby, must have the same bytes below; it gets what it lacks from a safekeeper, and what it has beyond VCL is
proposed and committed. Then it is promoted, and attached: the quorum's log goes on in the new timeline, which
lifts the fence. GUARD makes sure that from its first moment as a primary its commits wait for the quorum.

Invariant: a candidate is promoted only when it has replayed everything that may be committed (VCL, of an election
whose fence stands), its WAL up to there is the quorum's, and a quorum has all of its own. So no acknowledged commit
is missing, nothing can be acknowledged on the old timeline later, and the attachment cannot be refused.

Resuming: `next_step` looks at servers and safekeepers, never at what an earlier run did. A run that died anywhere
is followed by another that elects anew, which takes nothing back, and finds the rest done or not. A candidate that
is promoted already only needs ATTACH. `plan` follows the same function with each step's outcome assumed.

Times are nobody's business here. LSNs are bytes.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from walsender_bridge.errors import (
    DivergedError,
    FencedError,
    NotSupportedError,
    ServerSettingError,
)
from walsender_bridge.postgres.protocol.lsn import format_lsn
from walsender_bridge.quorum.proposer.effects import Lineage


class FailoverStep(StrEnum):
    """See the module; in this order, each one only where it is needed."""

    ELECT = "elect a proposer without a primary; the votes fence the timeline that stands"
    GUARD = "have the candidate's commits wait for the quorum once it is a primary"
    COMPARE = "compare the candidate's WAL with the quorum's"
    FOLLOW = "let the candidate stream from a safekeeper alone"
    RECEIVE = "wait until the candidate has all that may be committed"
    COMMIT = "propose what the candidate has beyond it, and have a quorum commit that"
    REPLAY = "wait until the candidate has replayed it"
    PROMOTE = "promote the candidate"
    ATTACH = "attach the new timeline to the safekeepers, which lifts the fence"
    DONE = "the safekeepers follow the promoted server"


@dataclass(frozen=True, slots=True)
class PromotionCandidate:
    """The server that becomes the primary, or is it by now. `end_lsn`: of its durable WAL.

    `follows`: it streams from a safekeeper, or from nobody, and will not from another server; None: its major (11, 12)
    cannot be told without a restart. `restores`: it has a `restore_command`. `guarded`: a commit on it waits for
    the proposer. `paused`: its replay is paused.
    """

    in_recovery: bool
    lineage: Lineage
    end_lsn: int
    replay_lsn: int
    guarded: bool = False
    follows: bool | None = False
    restores: bool = False
    paused: bool = False


@dataclass(frozen=True, slots=True)
class FailoverQuorum:
    """The safekeepers. `timeline`: a majority's logs are on it; `fenced`: the greatest that a failover fenced, or 0.

    `vcl`: of the election that this run has won; None before. `equal_to`: below it this run found the candidate's
    bytes to be the quorum's. `committed`: how far this run had the candidate's own WAL committed.
    """

    timeline: int
    fenced: int = 0
    vcl: int | None = None
    equal_to: int | None = None
    committed: int | None = None


def next_step(
    candidate: PromotionCandidate, quorum: FailoverQuorum, *, trusts_restore: bool = False
) -> FailoverStep:
    """What to do now. `trusts_restore`: the operator says that `restore_command` reads WAL of the quorum only.

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
            "the standby has a restore_command, which could bring WAL that no quorum has",
            repair="take it out, or say that it reads the safekeepers' WAL only",
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
                repair="point it at a safekeeper's WAL server, restart it, and run this again: it goes on from here",
            )
        return FailoverStep.RECEIVE
    # Who may still hear from the old server grows for ever; what is beyond is proposed when it is attached.
    wanted = candidate.end_lsn if candidate.follows else quorum.vcl
    if quorum.committed is None or quorum.committed < wanted:
        return FailoverStep.COMMIT
    return FailoverStep.REPLAY if candidate.replay_lsn < quorum.vcl else FailoverStep.PROMOTE


def _attached(candidate: PromotionCandidate, quorum: FailoverQuorum) -> FailoverStep:
    """For one that is a primary already."""
    timeline = candidate.lineage.timeline
    if timeline < quorum.timeline:
        raise DivergedError(
            f"this server is a primary on timeline {timeline}, the safekeepers are on {quorum.timeline}",
            repair="bring it back with pg_rewind; choose a standby of the server that the safekeepers follow",
        )
    if timeline <= quorum.fenced:
        raise FencedError(
            f"this server is a primary on timeline {timeline}, which a failover has fenced",
            repair="choose a standby, or take the failover back (`abort`)",
        )
    return FailoverStep.DONE if timeline == quorum.timeline else FailoverStep.ATTACH


def after(
    step: FailoverStep, candidate: PromotionCandidate, quorum: FailoverQuorum
) -> tuple[PromotionCandidate, FailoverQuorum]:
    """What is seen once a step has succeeded, as far as can be told beforehand."""
    vcl = quorum.vcl or 0
    match step:
        case FailoverStep.ELECT:
            assert quorum.vcl is not None, "who looks ahead says what VCL it expects"
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
            switches = (*old.switches, (old.timeline, candidate.end_lsn))
            lineage = Lineage(quorum.timeline + 1, switches)
            return replace(candidate, in_recovery=False, lineage=lineage), quorum
        case FailoverStep.ATTACH:
            return candidate, replace(quorum, timeline=candidate.lineage.timeline, fenced=0)
        case FailoverStep.DONE:
            return candidate, quorum


def plan(
    candidate: PromotionCandidate,
    quorum: FailoverQuorum,
    expected_vcl: int,
    *,
    trusts_restore: bool = False,
) -> list[FailoverStep]:
    """The steps from here to DONE, if each succeeds. Raises what `next_step` raises."""
    steps: list[FailoverStep] = []
    while FailoverStep.DONE not in steps:
        step = next_step(candidate, quorum, trusts_restore=trusts_restore)
        steps.append(step)
        if step == FailoverStep.ELECT:
            quorum = replace(quorum, vcl=expected_vcl)
        candidate, quorum = after(step, candidate, quorum)
    return steps
