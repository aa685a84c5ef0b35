"""Epoch histories, memberships and lineages: the small pure parts of the quorum."""

import pytest

from walsender_bridge.errors import CorruptError, DivergedError, NotSupportedError, UsageError
from walsender_bridge.postgres.protocol.lsn import WalPosition
from walsender_bridge.quorum.proposer.effects import Lineage
from walsender_bridge.quorum.proposer.lineage import successors
from walsender_bridge.quorum.protocol.configuration import Configuration, newest
from walsender_bridge.quorum.protocol.history import MAX_ENTRIES, History, HistoryEntry, divergence


def log(*entries: tuple[int, int] | tuple[int, int, int]) -> History:
    return History(
        tuple(HistoryEntry(each[0], each[1], each[2] if len(each) > 2 else 1) for each in entries)
    )


# The log of a safekeeper, where it ends; the leader's, where that ends; where they part.
PARTINGS = [
    ("the same", log((1, 10)), 50, log((1, 10)), 50, 50),
    ("it is behind", log((1, 10)), 30, log((1, 10)), 50, 30),
    ("it is ahead", log((1, 10)), 70, log((1, 10), (3, 50)), 50, 50),
    ("a tail of another epoch", log((1, 10), (2, 40)), 60, log((1, 10), (3, 50)), 50, 40),
    ("the leader's tail is longer", log((1, 10), (2, 40)), 60, log((1, 10), (3, 30)), 50, 30),
    (
        "an entry that does not count yet",
        log((1, 10), (2, 40)),
        35,
        log((1, 10), (2, 40), (3, 60)),
        60,
        35,
    ),
    (
        "an entry that just counts",
        log((1, 10), (2, 40)),
        40,
        log((1, 10), (2, 40), (3, 60)),
        60,
        40,
    ),
    (
        "one epoch on two timelines",
        log((1, 10), (2, 40), (2, 50, 2)),
        70,
        log((1, 10), (2, 40), (3, 60)),
        60,
        50,
    ),
    ("nothing in common", log((1, 10)), 30, log((2, 20)), 50, None),
    ("an empty log", log(), 0, log((2, 20)), 50, None),
    ("a pruned leader", log((1, 10), (2, 40)), 60, log((2, 40), (3, 70)), 70, 60),
]


@pytest.mark.parametrize(("what", "mine", "flush", "leader", "end", "point"), PARTINGS)
def test_where_two_logs_part(
    what: str, mine: History, flush: int, leader: History, end: int, point: int | None
) -> None:
    assert divergence(mine, flush, leader, end) == point, what


def test_of_two_logs_the_later_epoch_is_ahead_and_then_the_longer_one() -> None:
    longer, later = log((1, 10)).rank(90), log((1, 10), (2, 40)).rank(40)
    assert later > longer > log((1, 10)).rank(80) > log().rank(0)
    assert log((1, 10), (2, 40)).rank(39) == (1, 39)  # it is not in epoch 2 yet


def test_an_epoch_without_a_byte_leaves_no_entry() -> None:
    history = log((1, 10), (2, 50)).succeeded(50, [HistoryEntry(3, 50, 1)])
    assert history == log((1, 10), (3, 50))
    assert history.succeeded(50, [HistoryEntry(4, 50, 1), HistoryEntry(4, 50, 2)]) == log(
        (1, 10), (4, 50, 2)
    )


def test_a_history_is_pruned_below_the_horizon_but_for_what_logs_have_in_common() -> None:
    history = log((1, 10), (2, 40), (3, 60))
    assert history.pruned(50) == log((2, 40), (3, 60))
    assert history.pruned(60) == log((2, 40), (3, 60))
    assert history.pruned(61) == log((3, 60))
    assert history.pruned(0) == history


def test_a_history_that_goes_back_or_is_endless_is_refused() -> None:
    with pytest.raises(CorruptError):
        log((2, 10), (1, 20))
    with pytest.raises(CorruptError):
        log((1, 20), (2, 10))
    full = History(tuple(HistoryEntry(n + 1, n, 1) for n in range(MAX_ENTRIES + 1)))
    with pytest.raises(NotSupportedError, match="known to be committed"):
        full.compacted(MAX_ENTRIES, 0)
    assert len(full.compacted(MAX_ENTRIES, 2).entries) == MAX_ENTRIES


LONG = log((1, 10), (2, 40), (2, 50, 2), (3, 60, 2), (4, 70, 2), (5, 80, 2))


@pytest.mark.parametrize(
    ("limit", "commit", "left"),
    [
        (6, 90, LONG),
        (5, 90, log((2, 10), (2, 50, 2), (3, 60, 2), (4, 70, 2), (5, 80, 2))),
        (4, 90, log((3, 10), (3, 50, 2), (4, 70, 2), (5, 80, 2))),
        (1, 90, log((5, 10), (5, 50, 2))),  # timelines are never given up
        (1, 71, log((4, 10), (4, 50, 2), (5, 80, 2))),
        (1, 70, log((3, 10), (3, 50, 2), (4, 70, 2), (5, 80, 2))),  # nor what may not be committed
        (1, 10, LONG),
    ],
)
def test_committed_epochs_become_one_for_each_timeline(
    limit: int, commit: int, left: History
) -> None:
    compacted = LONG.compacted(limit, commit)
    assert compacted == left
    assert [compacted.timeline_at(at) for at in range(10, 99)] == [
        LONG.timeline_at(at) for at in range(10, 99)
    ]


def test_a_log_of_an_epoch_that_was_given_up_has_nothing_in_common() -> None:
    leader = LONG.compacted(3, 90)
    assert divergence(log((1, 10), (2, 40)), 49, leader, 90) is None
    assert divergence(log((1, 10), (2, 40), (2, 50, 2), (3, 60, 2)), 65, leader, 90) is None
    assert divergence(LONG, 75, leader, 90) == 75
    # One that began anew, and ends below where its epoch began.
    assert divergence(leader, 55, LONG.compacted(2, 90), 90) is None
    assert divergence(leader, 55, leader, 90) == 55
    assert leader.rank(55) < LONG.rank(71)


def test_timelines_are_those_of_the_entries() -> None:
    history = log((1, 10), (2, 40), (2, 50, 3))
    assert [history.timeline_at(at) for at in (10, 49, 50, 99)] == [1, 1, 3, 3]
    assert [history.boundary_after(at) for at in (10, 49, 50)] == [50, 50, None]
    with pytest.raises(CorruptError):
        history.timeline_at(9)


# -- membership -------------------------------------------------------------------------------------


def test_12_a_joint_quorum_needs_a_majority_of_each_membership() -> None:
    old = Configuration(1, frozenset({1, 2, 3}))
    joint = old.joint({3, 4, 5})
    assert old.has_quorum({1, 2})
    assert not joint.has_quorum({1, 2, 3})
    assert not joint.has_quorum({3, 4, 5})
    assert joint.has_quorum({2, 3, 4})
    assert joint.quorum_lsn({1: 90, 2: 80, 3: 70, 4: 20, 5: 10}) == 20
    assert joint.completed() == Configuration(3, frozenset({3, 4, 5}))
    with pytest.raises(UsageError, match="changing already"):
        joint.joint({1})
    with pytest.raises(UsageError):
        old.joint(())


def test_a_configuration_of_a_later_term_wins_over_a_later_generation() -> None:
    left_behind = Configuration(2, frozenset({1}), frozenset({9}), term=3)
    led = Configuration(1, frozenset({1}), None, term=4)
    assert newest((left_behind, led)) == led
    assert not newest(()).has_quorum({1})


# -- lineage ----------------------------------------------------------------------------------------

LOG = log((1, 10))


def test_16_a_promotion_at_vcl_works() -> None:
    assert successors(LOG, 50, 7, Lineage(2, (WalPosition(1, 50),))) == (
        HistoryEntry(7, 50, 1),
        HistoryEntry(7, 50, 2),
    )
    assert LOG.succeeded(50, successors(LOG, 50, 7, Lineage(2, (WalPosition(1, 50),)))) == log(
        (1, 10), (7, 50, 2)
    )


def test_16_a_promotion_below_vcl_is_refused() -> None:
    with pytest.raises(DivergedError, match="left timeline 1 at 0/31"):
        successors(LOG, 50, 7, Lineage(2, (WalPosition(1, 49),)))


def test_16_what_a_standby_had_beyond_vcl_is_proposed_on_the_old_timeline() -> None:
    entries = successors(LOG, 50, 7, Lineage(3, (WalPosition(1, 60), WalPosition(2, 80))))
    assert entries == (HistoryEntry(7, 50, 1), HistoryEntry(7, 60, 2), HistoryEntry(7, 80, 3))


def test_15_a_server_on_a_timeline_that_was_left_is_refused() -> None:
    with pytest.raises(DivergedError, match="pg_rewind"):
        successors(log((1, 10), (2, 40, 2)), 50, 7, Lineage(1))


def test_a_timeline_that_was_left_elsewhere_is_refused() -> None:
    with pytest.raises(DivergedError, match="this server did not"):
        successors(log((1, 10), (2, 40, 2)), 50, 7, Lineage(2, (WalPosition(1, 30),)))
