"""What the replicas of a lost repository offer, and what is decided from it: ends, members, refusals, and the new state."""

from dataclasses import replace

import pytest

from walsender_bridge.change_log.protocol import (
    MAX_COUNT,
    REBUILD_GAP,
    START,
    CommitContext,
    Position,
    ReplicaReport,
    ReplicaStatus,
    is_from_before_a_rebuild,
)
from walsender_bridge.change_log.replica.disk import IndexRow
from walsender_bridge.change_log.repository import rebuild
from walsender_bridge.change_log.repository.core import Repository, RepositoryTick
from walsender_bridge.change_log.repository.invariants import check_invariants, checked
from walsender_bridge.change_log.repository.membership import ReplicationPolicy
from walsender_bridge.change_log.repository.rebuild import (
    AskedLogServer,
    Offer,
    RebuildPlan,
    StreamHistory,
)
from walsender_bridge.errors import (
    ConfigError,
    CorruptError,
    DivergedError,
    InvalidReplicaError,
    TusklineError,
    UnavailableError,
    UsageError,
)
from walsender_bridge.postgres.protocol.lsn import WalPosition

POLICY = ReplicationPolicy(replicas=3, min_replicas=2)
SERVERS = tuple(AskedLogServer(f"at-{each}", each) for each in "klm")


def row(version: int, *, place: int | None = None, crc: int = 7) -> IndexRow:
    """The commit of a version: one entry, of 10 bytes, at the offset of that number."""
    context = CommitContext(version, version, version if place is None else place, 1)
    end = version + 1
    position = Position(end, 100 * end, end, end, 1, 10 * version, crc)
    return IndexRow(context, 10, position, 1_000_000 * version)


def offer(log_server: str, version: int, *, stream: str = "a", low: int = 1) -> Offer:
    """A replica that has the commits up to that version."""
    last = row(version) if version else None
    return Offer(
        log_server,
        stream,
        "log",
        "",
        term=5,
        low_offset=low,
        committed_end=version + 1,
        context=None if last is None else last.context,
        bytes_total=10 * version,
        last=last,
    )


def empty(its: Offer, version: int) -> Offer:
    """The same replica, which knows a later version."""
    assert its.context is not None
    end = its.context.global_end
    return replace(its, context=CommitContext(version, its.committed_end, end, 0))


def plan(*offers: Offer, servers: tuple[AskedLogServer, ...] = SERVERS) -> RebuildPlan:
    return rebuild.plan(servers, offers, POLICY)


# -- where a stream ends ----------------------------------------------------------------------------


def test_31_the_newest_commit_of_any_replica_is_the_end_and_who_has_it_is_a_member() -> None:
    found = plan(offer("k", 3), offer("l", 4), empty(offer("m", 4), 9))
    assert (found.log_id, found.version, found.fence) == ("log", 9, 9 + REBUILD_GAP)
    assert found.next_global == 5 + REBUILD_GAP
    (its,) = found.streams
    assert (its.end, its.members, its.behind, its.near) == (5, ("l", "m"), ("k",), ("k",))
    assert its.term > 5
    assert found.fence_of(its) == CommitContext(found.fence, 5, found.next_global, 0)


def test_31_a_replica_that_is_not_valid_is_no_member_and_its_version_counts() -> None:
    sick = replace(empty(offer("m", 8), 20), reason="entries 2 to 3 are lost")
    found = plan(offer("k", 4), offer("l", 4), sick)
    (its,) = found.streams
    assert (its.end, its.members, its.learning) == (5, ("k", "l"), ("m",))
    assert found.fence == 20 + REBUILD_GAP


def test_31_a_replica_that_missed_an_earlier_rebuild_is_no_member_however_far_it_reaches() -> None:
    """Its last commits may be ones that were dropped then."""
    later = 6 + REBUILD_GAP
    (its,) = plan(offer("k", 6), *(empty(offer(each, 4), later) for each in "lm")).streams
    assert (its.end, its.members, its.behind, its.learning) == (5, ("l", "m"), (), ("k",))


def test_31_a_replica_that_lacks_much_is_left_to_be_synchronized_later() -> None:
    far = replace(offer("k", 2), bytes_total=0)
    ends = [replace(offer(each, 4), bytes_total=rebuild.LITTLE + 1) for each in "lm"]
    (its,) = plan(far, *ends).streams
    assert (its.behind, its.near) == (("k",), ())


def test_31_a_stream_that_never_committed_begins_at_its_start() -> None:
    found = plan(*(offer(each, 0) for each in "klm"))
    (its,) = found.streams
    assert (its.end, found.version, found.next_global) == (1, 0, 1 + REBUILD_GAP)


# -- a rebuild that was interrupted -----------------------------------------------------------------


def fenced(its: Offer) -> Offer:
    return empty(its, REBUILD_GAP + 9)


def test_31_a_rebuild_is_repeated_that_ended_between_the_fences_of_two_replicas() -> None:
    (its,) = plan(fenced(offer("k", 4)), offer("l", 4), offer("m", 3)).streams
    assert (its.end, its.members, its.learning) == (5, ("k", "l"), ("m",))
    found = plan(fenced(offer("k", 4)), offer("l", 4), servers=(*SERVERS[:2], GIVEN_UP))
    assert found.streams[0].members == ("k", "l")
    (its,) = plan(fenced(offer("k", 4)), offer("l", 3), offer("m", 3)).streams
    assert (its.members, its.learning) == (("k",), ("l", "m"))


def test_31_a_rebuild_is_repeated_that_ended_between_two_streams() -> None:
    other = [offer(each, 2, stream="b") for each in "klm"]
    found = plan(*(fenced(offer(each, 4)) for each in "klm"), *other)
    assert [its.members for its in found.streams] == [("k", "l", "m")] * 2
    with pytest.raises(InvalidReplicaError, match="missed an earlier rebuild"):
        # The other two may have gone on behind the gap.
        plan(*(fenced(offer(each, 4)) for each in "klm"), other[0])


def cut_short(its: Offer, source: str) -> Offer:
    """The same replica, whose synchronization has not ended."""
    return replace(its, reason="it is being synchronized", source=source)


def test_31_a_rebuild_is_repeated_whose_synchronization_was_cut_short() -> None:
    servers = (*SERVERS[:2], GIVEN_UP)
    (its,) = plan(offer("k", 4), cut_short(offer("l", 3), "k"), servers=servers).streams
    assert (its.members, its.learning) == (("k",), ("l",))
    with pytest.raises(InvalidReplicaError, match="the 2 others may have been all members"):
        # What it has not taken yet may be known to that source alone.
        plan(offer("k", 4), cut_short(offer("l", 3), "m"), servers=servers)
    two = ReplicationPolicy(replicas=2, min_replicas=1)
    found = rebuild.plan(SERVERS[:2], [offer("k", 4), cut_short(offer("l", 0), "k")], two)
    assert found.streams[0].members == ("k",)
    # The first attempt has ended with one stream by then.
    whole = [fenced(offer(each, 4)) for each in "kl"]
    other = [offer("k", 2, stream="b"), cut_short(offer("l", 1, stream="b"), "k")]
    found = plan(*whole, *other, servers=servers)
    assert [its.members for its in found.streams] == [("k", "l"), ("k",)]


def test_31_the_next_fence_is_behind_one_that_nobody_who_answers_knows() -> None:
    """An attempt ended behind its first fence; that replica is given up, and returns later."""
    first = plan(empty(offer("m", 4), 9), offer("l", 4), offer("k", 4))
    assert first.fence_of(first.streams[0]).version == 9 + REBUILD_GAP
    left = [replace(offer(each, 4), term=first.streams[0].term) for each in "kl"]
    second = plan(*left, servers=(*SERVERS[:2], GIVEN_UP))
    assert is_from_before_a_rebuild(first.fence, second.fence)
    state = built(second)
    its = ReplicaReport("m", "a", "log", 5, first.fence, 5, 0, row(4).position, 1)
    assert not state.evaluate([its])[0].ahead
    # What no attempt has given out leaves room for others.
    made_up = replace(left[0], term=1 << 48)
    assert plan(made_up, left[1], servers=(*SERVERS[:2], GIVEN_UP)).fence == second.fence


def test_31_replicas_that_missed_a_rebuild_do_not_stand_for_members_that_are_lost() -> None:
    servers = (*SERVERS, AskedLogServer("at-n", "n"))
    with pytest.raises(InvalidReplicaError, match="missed an earlier rebuild"):
        plan(fenced(offer("k", 4)), offer("l", 3), servers=servers)
    (its,) = plan(fenced(offer("k", 4)), offer("l", 5), offer("m", 3)).streams
    assert (its.end, its.members) == (5, ("k",)), "a commit that the rebuild has dropped"


# -- refusals ---------------------------------------------------------------------------------------


def test_31_counts_that_leave_no_room_behind_the_gap_are_refused_by_name() -> None:
    """No replica would take what the rebuilt repository issues next."""
    its = offer("k", 4)
    assert its.context is not None
    assert its.last is not None
    far = MAX_COUNT - 5
    rows = replace(its.last, context=replace(its.last.context, global_offset=far))
    for made_up in (
        replace(its, context=replace(its.context, version=far)),
        replace(its, context=replace(its.context, global_offset=far), last=rows),
        replace(its, term=far),
    ):
        with pytest.raises(InvalidReplicaError, match=r"log server k offers .* higher than any"):
            plan(made_up, offer("l", 4), offer("m", 4))


SILENT = replace(SERVERS[2], log_server="")
GIVEN_UP = replace(SILENT, given_up=True)
WHOLE = [offer(each, 4) for each in "klm"]
SICK = replace(WHOLE[0], reason="damaged")
REFUSALS: dict[str, tuple[list[Offer], tuple[AskedLogServer, ...], type[TusklineError], str]] = {
    "a log server is away": (
        WHOLE[:2],
        (*SERVERS[:2], SILENT),
        UnavailableError,
        "may have the newest commit",
    ),
    "as many are given up as may be all members": (
        WHOLE[:1],
        (SERVERS[0], replace(GIVEN_UP, address="at-l"), GIVEN_UP),
        UnavailableError,
        "may have been all members",
    ),
    "one that answers is given up": (
        WHOLE,
        (*SERVERS[:2], replace(SERVERS[2], given_up=True)),
        UsageError,
        "cannot be given up",
    ),
    "a copy": (WHOLE[:2], (*SERVERS[:2], replace(SERVERS[1], address="x")), ConfigError, "same id"),
    "nothing at all": ([], SERVERS, ConfigError, "no log server has a valid replica"),
    "two of three are damaged": (
        [*WHOLE[2:], SICK, replace(SICK, log_server="l")],
        SERVERS,
        InvalidReplicaError,
        "the 2 others may have been all members (log server k: damaged; ",
    ),
    "one is given up, and another one damaged": (
        [WHOLE[1], SICK],
        (*SERVERS[:2], GIVEN_UP),
        InvalidReplicaError,
        "2 others",
    ),
    "another log": (
        [*WHOLE[:2], replace(WHOLE[2], log_id="other")],
        SERVERS,
        DivergedError,
        "two logs",
    ),
    "one version with two meanings": (
        [*WHOLE[:2], replace(WHOLE[2], committed_end=4, context=CommitContext(4, 4, 9, 0))],
        SERVERS,
        DivergedError,
        "version 4 ends at 5 and at 4",
    ),
    "a later version without the commit": (
        [*WHOLE[:2], empty(offer("m", 3), 6)],
        SERVERS,
        DivergedError,
        "version 4 ends at 5, and the other one ends at 4 in version 6",
    ),
    "another global offset": (
        [*WHOLE[:2], replace(empty(WHOLE[2], 6), last=row(4, place=8))],
        SERVERS,
        DivergedError,
        "the last commits, which end at 5, differ",
    ),
    "another entry": (
        [*WHOLE[:2], replace(WHOLE[2], last=row(4, crc=8))],
        SERVERS,
        DivergedError,
        "the last commits, which end at 5, differ",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_31_what_leaves_a_doubt_is_refused_by_name(case: str) -> None:
    offers, servers, error, what = REFUSALS[case]
    with pytest.raises(error) as raised:
        plan(*offers, servers=servers)
    assert what in raised.value.what
    assert raised.value.repair


def test_31_a_replica_behind_with_another_commit_is_refused() -> None:
    rows = [row(version) for version in range(1, 5)]
    rebuild.check_history("a", [offer("m", 3)], rows)
    rebuild.check_history("a", [offer("m", 1)], rows[2:])
    with pytest.raises(DivergedError, match="a commit that the others do not have"):
        rebuild.check_history("a", [replace(offer("m", 3), last=row(3, crc=8))], rows)


def test_31_a_replica_that_changed_while_it_was_sealed_is_refused() -> None:
    found = plan(*WHOLE)
    (its,) = found.streams
    status = ReplicaStatus(
        "a", "log", "sealed", its.term, 1, 5, 5, found.fence, 500, 7, 1, 5, 500, None, 40, None
    )
    rebuild.check_sealed(found, its, [status, status])
    with pytest.raises(UnavailableError, match="sealing at 5"):
        rebuild.check_sealed(found, its, [status, replace(status, state="sealing")])
    with pytest.raises(DivergedError, match="different entries"):
        rebuild.check_sealed(found, its, [status, replace(status, last_crc=8)])


def test_31_members_know_how_far_the_slot_was_confirmed_and_others_take_it_from_one() -> None:
    (its,) = plan(*WHOLE).streams
    status = ReplicaStatus(
        "a", "log", "sealed", its.term, 1, 5, 5, 4, 500, 7, 1, 5, 500, WalPosition(1, 8), 40, 3
    )
    earlier = replace(status, confirmed_to=WalPosition(1, 7))
    nothing = replace(status, confirmed_to=None, system_id=None)
    found = rebuild.with_told(its, {"k": earlier, "l": status, "m": nothing})
    assert (found.members, found.behind, found.near) == (("l",), ("k", "m"), ("k", "m"))
    assert (its.source, found.source) == ("k", "l")
    assert rebuild.with_told(its, dict.fromkeys("klm", status)) == its


# -- the new state ----------------------------------------------------------------------------------


def built(found: RebuildPlan, low: int = 1, *, hold: float = 100.0) -> Repository:
    rows = [row(version) for version in range(low, 5)]
    histories = {"a": StreamHistory(("k", "l", "m"), rows, row(4).position, low)}
    addresses = {each.log_server: each.address for each in SERVERS}
    return rebuild.rebuilt(found, histories, addresses, replicas=3, now=50.0, hold=hold)


def reports(found: RebuildPlan, entries: int) -> list[ReplicaReport]:
    (its,) = found.streams
    position = replace(row(4).position, end_offset=5 + entries, end_lsn=900)
    return [
        ReplicaReport(each, "a", "log", its.term, found.fence, 5, entries, position, 1)
        for each in "klm"
    ]


@pytest.mark.parametrize("low", [1, 3, 5])
def test_31_the_new_state_goes_on_behind_the_gap(low: int) -> None:
    found = plan(*(replace(each, low_offset=low) for each in WHOLE))
    state = built(found, low)
    check_invariants(state, checked(state))
    assert Repository.from_record(state.to_record()).to_record() == state.to_record()
    assert state.version == state.published == found.fence
    before = checked(state)
    assert all(not each.reason for each in state.evaluate(reports(found, 0)))
    state.apply(RepositoryTick(51.0, tuple(reports(found, 2))))
    check_invariants(state, before)
    stream = state.streams["a"]
    assert stream.latest == CommitContext(found.fence + 1, 5, found.next_global, 2)
    # For consumers that come back.
    assert [each.end for each in stream.past[:1]] == ([low] if low < 5 else [])


def test_31_what_some_member_has_trimmed_is_promised_to_nobody() -> None:
    """Another one has it still, and may be lost."""
    found = plan(offer("k", 4), offer("l", 4, low=3), offer("m", 4))
    rows = [row(version) for version in range(1, 5)]
    histories = {"a": StreamHistory(("k", "l", "m"), rows, row(4).position, 3)}
    state = rebuild.rebuilt(found, histories, {}, replicas=3, now=50.0, hold=100.0)
    check_invariants(state, checked(state))
    assert state.streams["a"].low_offset([]) == 3


def test_31_nothing_is_trimmed_until_the_hold_ends_and_versions_of_consumers_are_found() -> None:
    found = plan(*WHOLE)
    state = built(found)
    for _ in range(3):
        state.apply(RepositoryTick(60.0, tuple(reports(found, 2)), ({},)))
    assert state.trim_limit("a", 60.0) == 1
    needed = state.streams["a"].needed_from(2)
    assert needed is not None
    assert needed.end == 3
    assert state.trim_limit("a", 151.0) == 5
    assert built(found, hold=0.0).consumers == {}


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_31_a_history_with_a_hole_is_refused(missing: int) -> None:
    found = plan(*WHOLE)
    rows = [row(version) for version in range(1, 5)]
    del rows[missing]
    histories = {"a": StreamHistory(("k", "l"), rows, row(4).position, 1)}
    with pytest.raises(CorruptError, match=r"missing|the commits end at"):
        rebuild.rebuilt(found, histories, {}, replicas=3, now=0.0, hold=0.0)


def test_31_what_was_trimmed_whole_is_known_by_its_end() -> None:
    whole = [replace(each, low_offset=5, last=None) for each in WHOLE]
    state = built(plan(*whole), 5)
    (begin,) = state.streams["a"].history
    assert (begin.context, begin.position) == (CommitContext(4, 5, 5, 0), row(4).position)
    assert state.streams["a"].needed_from(3) is None
    assert begin.position != START
