"""The steps of a failover, one by one: what is next, what is refused, and what a dry run says."""

from dataclasses import replace

import pytest

from walsender_bridge.errors import (
    DivergedError,
    FencedError,
    NotSupportedError,
    ServerSettingError,
    TrimmedError,
)
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.quorum.failover.compare import compared_range
from walsender_bridge.quorum.failover.plan import (
    FailoverQuorum,
    FailoverStep,
    PromotionCandidate,
    next_step,
    plan,
)
from walsender_bridge.quorum.proposer import election, lineage
from walsender_bridge.quorum.proposer.effects import Lineage
from walsender_bridge.quorum.protocol import messages as m
from walsender_bridge.quorum.protocol.configuration import Configuration
from walsender_bridge.quorum.protocol.history import History, HistoryEntry

STANDBY = PromotionCandidate(in_recovery=True, lineage=Lineage(1), end_lsn=200, replay_lsn=200)
READY = replace(STANDBY, guarded=True, follows=True)
VCL = FailoverQuorum(timeline=1, fenced=1, vcl=200, equal_to=200, committed=200)
PRIMARY = PromotionCandidate(
    in_recovery=False, lineage=Lineage(2, (WalPosition(1, 200),)), end_lsn=300, replay_lsn=200
)


def test_16_a_standby_at_vcl_is_promoted_and_one_below_is_not() -> None:
    assert next_step(READY, VCL) == FailoverStep.PROMOTE
    assert next_step(replace(READY, end_lsn=199), VCL) == FailoverStep.RECEIVE
    assert next_step(replace(READY, replay_lsn=199), VCL) == FailoverStep.REPLAY


def test_16_a_log_that_has_changed_its_timeline_can_be_failed_over_again() -> None:
    log = History((HistoryEntry(1, 100, 1), HistoryEntry(3, 200, 1), HistoryEntry(3, 240, 2)))
    origin = lineage.of_log(log, 300)
    assert origin == Lineage(2, (WalPosition(1, 240),))
    assert lineage.successors(log, 300, 4, origin) == (HistoryEntry(4, 300, 2),)
    # What does not count says nothing: the log ends before the switch.
    assert lineage.successors(log, 220, 4, lineage.of_log(log, 220)) == (HistoryEntry(4, 220, 1),)


def test_16_a_tail_is_committed_first_and_nothing_without_an_election() -> None:
    assert next_step(replace(READY, end_lsn=240), VCL) == FailoverStep.COMMIT
    assert next_step(READY, replace(VCL, vcl=None)) == FailoverStep.ELECT
    assert next_step(replace(READY, guarded=False), VCL) == FailoverStep.GUARD


def test_17_bytes_are_compared_before_a_safekeeper_s_replace_them() -> None:
    unknown = replace(VCL, equal_to=None)
    assert next_step(replace(READY, follows=False, end_lsn=150), unknown) == FailoverStep.COMPARE


def test_17_what_is_compared_begins_where_the_voters_wal_does() -> None:
    def compared(vcl: int, held_from: int, end: int = 208) -> tuple[int, int]:
        return compared_range(replace(STANDBY, end_lsn=end), vcl, held_from, 8, 16)

    assert compared(208, 192) == (200, 208)
    assert compared(208, 208) == (208, 208)
    assert compared(212, 192, end=220) == (208, 212)  # a standby may lack the segment before
    assert compared(240, 208) == (208, 208)
    with pytest.raises(TrimmedError, match="cannot receive what it lacks"):
        compared(240, 224)


def test_16_a_major_that_cannot_be_told_is_promoted_with_what_it_has_or_says_what_to_do() -> None:
    old = replace(READY, follows=None, end_lsn=260)
    assert next_step(old, VCL) == FailoverStep.PROMOTE  # it may still hear from the old primary
    with pytest.raises(NotSupportedError, match="only with a restart"):
        next_step(replace(old, end_lsn=199), VCL)


def test_a_dry_run_is_the_same_function() -> None:
    expected = [
        step for step in FailoverStep if step not in {FailoverStep.RECEIVE, FailoverStep.REPLAY}
    ]
    assert plan(replace(STANDBY, end_lsn=240, replay_lsn=240), FailoverQuorum(1), 200) == expected
    assert FailoverStep.RECEIVE in plan(replace(STANDBY, end_lsn=140), FailoverQuorum(1), 200)
    assert plan(PRIMARY, FailoverQuorum(1, fenced=1), 200) == [
        FailoverStep.ATTACH,
        FailoverStep.DONE,
    ]
    assert plan(PRIMARY, FailoverQuorum(2), 200) == [FailoverStep.DONE]


@pytest.mark.parametrize(
    ("candidate", "quorum", "error"),
    [
        (replace(STANDBY, lineage=Lineage(2)), FailoverQuorum(1), DivergedError),
        (replace(STANDBY, restores=True), FailoverQuorum(1), ServerSettingError),
        (replace(STANDBY, paused=True), FailoverQuorum(1), ServerSettingError),
        (replace(PRIMARY, lineage=Lineage(1)), FailoverQuorum(1, fenced=1), FencedError),
        (replace(PRIMARY, lineage=Lineage(1)), FailoverQuorum(2), DivergedError),
    ],
)
def test_who_cannot_become_the_primary_is_refused_before_anybody_is_displaced(
    candidate: PromotionCandidate, quorum: FailoverQuorum, error: type[Exception]
) -> None:
    with pytest.raises(error):
        next_step(candidate, quorum)


def test_30_what_all_had_of_a_record_that_was_replaced_is_not_what_all_have() -> None:
    """All had 264, inside a record from 200 on, where another epoch went on; then one of the old ones votes."""
    new = History((HistoryEntry(1, 100, 1), HistoryEntry(2, 200, 2)))
    best = m.VoteReply(m.NodeId(3, 1), 300, 300, 200, 100, new, Configuration())
    away = m.VoteReply(m.NodeId(3, 1), 250, 0, 264, 100, History(new.entries[:1]), Configuration())
    assert election.restart(away, best, 300) == 200
    assert election.restart(best, best, 300) == 200
