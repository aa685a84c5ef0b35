"""The metadata repository's core: the seed's exchange, which reports count, barriers, history."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from walsender_bridge.change_log.protocol import MAX_COUNT, CommitContext, Position, ReplicaReport
from walsender_bridge.change_log.repository.core import (
    ConsumerDropped,
    ConsumerSeen,
    Created,
    LogServerSeen,
    Record,
    ReplicasAssigned,
    Repository,
    RepositoryTick,
    StreamCreated,
    StreamSealed,
    StreamState,
    StreamUnsealed,
    TermGiven,
    VersionRaised,
    record_from_json,
    record_to_json,
)
from walsender_bridge.change_log.repository.invariants import check_invariants, checked


def missed(stream: StreamState, version: int) -> list[CommitContext]:
    return [each.context for each in stream.missed(version)]


def report(
    stream: str,
    version: int,
    local: int,
    length: int,
    *,
    log_server: str = "k",
    lsn: int | None = None,
) -> ReplicaReport:
    """A report whose entries end at LSN 100 * offset, of 10 bytes each."""
    end = local + length
    end_lsn = 100 * (end - 1) if lsn is None else lsn
    position = Position(end, end_lsn, end, end, 1, 10 * (end - 1), 0)
    return ReplicaReport(log_server, stream, "log", 1, version, local, length, position, 1)


def log_of(*streams: str, log_servers: tuple[str, ...] = ("k",)) -> Repository:
    state = Repository()
    state.apply(Created("log"))
    for stream in streams:
        state.apply(StreamCreated(stream, log_servers))
        if len(log_servers) > 1:
            state.apply(StreamSealed(stream, 1))
            state.apply(StreamUnsealed(stream, 1, log_servers))
    return state


def tick(
    state: Repository, *reports: ReplicaReport, barriers: tuple[dict[str, int], ...] = ()
) -> bool:
    return state.apply(RepositoryTick(0.0, reports, barriers))


def contexts(state: Repository, version: int) -> dict[str, CommitContext]:
    assert state.version == version
    return {name: stream.latest for name, stream in state.streams.items()}


def test_the_exchange_of_the_seed_with_its_figures() -> None:
    state = log_of("ls1", "ls2")
    tick(state, report("ls1", 0, 1, 1), report("ls2", 0, 1, 1))  # 1, 2
    assert contexts(state, 1) == {
        "ls1": CommitContext(version=1, local_offset=1, global_offset=1, length=1),  # 3
        "ls2": CommitContext(version=1, local_offset=1, global_offset=2, length=1),  # 4
    }
    tick(state, report("ls1", 1, 2, 0), report("ls2", 1, 2, 1))  # 5, 6
    assert contexts(state, 2) == {
        "ls1": CommitContext(version=2, local_offset=2, global_offset=3, length=0),  # 7
        "ls2": CommitContext(version=2, local_offset=2, global_offset=3, length=1),  # 8
    }


def test_nothing_new_is_no_version_and_no_record() -> None:
    state = log_of("a")
    assert not tick(state, report("a", 0, 1, 0))
    assert tick(state, report("a", 0, 1, 2))
    assert not tick(state, report("a", 0, 1, 2))  # the same again: it was committed (I7)
    assert tick(state, report("a", 1, 3, 0))  # it has taken the commit: version 1 is published
    assert not tick(state, report("a", 1, 3, 0))
    assert (state.version, state.published) == (1, 1)


IGNORED = {
    "never issued": report("a", 9, 3, 1),
    "of another log": replace(report("a", 1, 3, 1), log_id="other"),
    "of no stream": report("b", 1, 3, 1),
    "of a log server without a replica": report("a", 1, 3, 1, log_server="x"),
    "behind its version": report("a", 1, 2, 2),
    "ahead of its version": report("a", 1, 4, 1),
    "older than what it told before": report("a", 0, 1, 3),
    "of an inconsistent length": replace(report("a", 1, 3, 1), length=5),
}


@pytest.mark.parametrize("case", list(IGNORED))
def test_a_report_that_cannot_be_placed_is_ignored(case: str) -> None:
    state = log_of("a")
    state.apply(ConsumerSeen("lake", None, until=9.0))  # the history of version 0 is kept
    tick(state, report("a", 0, 1, 2))
    tick(state, report("a", 1, 3, 0))
    before = json.dumps(state.to_record())
    assert state.evaluate([IGNORED[case]])[0].reason
    assert not tick(state, IGNORED[case])
    assert json.dumps(state.to_record()) == before


def test_a_replica_that_is_behind_gets_what_it_missed_and_then_takes_part() -> None:
    state = log_of("a", "b")
    tick(state, report("a", 0, 1, 2))
    tick(state, report("b", 0, 1, 1))
    tick(state, report("a", 1, 3, 3))
    behind = report("a", 1, 3, 9)
    assert not tick(state, behind)
    behind = report("a", 0, 1, 9)
    stream = state.streams["a"]
    assert missed(stream, behind.version) == [
        CommitContext(1, 1, 1, 2),
        CommitContext(3, 3, 4, 3),
    ]
    assert missed(stream, 1) == [CommitContext(3, 3, 4, 3)]
    assert missed(stream, 3) == []
    assert missed(state.streams["b"], 0) == [CommitContext(2, 1, 3, 1), CommitContext(3, 2, 7, 0)]
    # Its nine entries are not offered again below what was committed of them.
    tick(state, report("a", 3, 6, 4))
    assert state.streams["a"].latest == CommitContext(4, 6, 7, 4)


def test_what_all_replicas_hold_is_committed_and_silence_of_one_commits_nothing() -> None:
    state = log_of("a", log_servers=("k", "l", "m"))
    assert not tick(state, report("a", 0, 1, 5), report("a", 0, 1, 7, log_server="l"))
    tick(
        state,
        report("a", 0, 1, 5),
        report("a", 0, 1, 3, log_server="l"),
        report("a", 0, 1, 7, log_server="m"),
    )
    assert state.streams["a"].latest == CommitContext(1, 1, 1, 3)
    tick(state, report("a", 1, 4, 2), report("a", 1, 4, 0, log_server="l"))
    assert state.published == 0  # m has not got it yet (I12)
    tick(state, report("a", 1, 4, 4, log_server="m"))
    assert (state.version, state.published) == (1, 1)


def test_16_reports_of_one_replica_however_often_are_not_those_of_all() -> None:
    state = log_of("a", "b", log_servers=("k", "l", "m"))
    once = report("a", 0, 1, 5)
    assert not tick(state, once, replace(once, length=5), once)
    # Nor are those of other streams, or of different moments.
    assert not tick(state, once, *(report("b", 0, 1, 5, log_server=each) for each in "lm"))
    assert not tick(state, report("a", 0, 1, 5, log_server="l"))
    assert not tick(state, report("a", 0, 1, 5, log_server="m"))
    assert state.version == 0


def test_16_a_report_from_before_the_last_commit_commits_nothing_with_newer_ones(
    three: Repository,
) -> None:
    newer = [sealed_report(2, each, 1) for each in "kl"]
    before = replace(report("a", 0, 1, 5, log_server="m"), term=1)
    tick(three, *newer, before)
    assert three.version == 1
    tick(three, *newer, sealed_report(2, "m", 1))
    assert three.version == 2


def test_17_a_report_again_after_its_commit_and_in_any_order_commits_nothing() -> None:
    state = log_of("a", log_servers=("k", "l"))
    reports = [report("a", 0, 1, 3, log_server=each) for each in "kl"]
    assert tick(state, *reports)
    taken = [report("a", 1, 4, 0, log_server=each) for each in "kl"]
    for late in (reports, reports[::-1], [*reports, *reports], [taken[0], reports[1]]):
        tick(state, *late)
        assert contexts(state, 1) == {"a": CommitContext(1, 1, 1, 3)}


def test_18_a_second_repository_with_the_same_log_gives_the_same_offsets() -> None:
    """Also one that goes on from a checkpoint between any two records; global offsets follow the order of names."""
    records: list[Record] = [Created("log"), *(StreamCreated(each, ("k",)) for each in "cab")]
    for version in range(3):
        reports = tuple(report(each, version, 1 + version, 1) for each in "bca")
        records.append(RepositoryTick(float(version), reports))
    runs = []
    for restart in range(len(records) + 1):
        state, given = Repository(), []
        for number, record in enumerate(records):
            if number == restart:
                state = Repository.from_record(json.loads(json.dumps(state.to_record())))
            state.apply(record)
            given.append({name: state.streams[name].latest for name in sorted(state.streams)})
        runs.append((given, state.to_record()))
    assert all(each == runs[0] for each in runs)
    last = runs[0][0][-1]
    assert {name: context.global_offset for name, context in last.items()} == {
        "a": 7,
        "b": 8,
        "c": 9,
    }


def test_20_a_stream_is_unsealed_once_and_by_its_last_seal(three: Repository) -> None:
    three.apply(StreamSealed("a", 2))
    three.apply(StreamSealed("a", 3))
    before = json.dumps(three.to_record())
    assert not three.apply(StreamUnsealed("a", 2, ("k",))), "it has been sealed again since"
    assert json.dumps(three.to_record()) == before
    assert three.apply(StreamUnsealed("a", 3, ("k", "l")))
    before = json.dumps(three.to_record())
    for members in (("k", "l"), ("k", "l", "m")):
        assert not three.apply(StreamUnsealed("a", 3, members)), "idempotent"
        assert json.dumps(three.to_record()) == before


def test_a_stream_learns_the_version_at_its_birth() -> None:
    state = log_of("a")
    tick(state, report("a", 0, 1, 4))
    state.apply(StreamCreated("b", ("k",)))
    assert missed(state.streams["b"], 0) == [CommitContext(1, 1, 5, 0)]
    assert not state.apply(StreamCreated("b", ("k",)))


# -- barriers ---------------------------------------------------------------------------------------


def test_a_barrier_waits_for_its_positions_and_forces_one_version_for_all() -> None:
    state = log_of("a", "b")
    two = ({"a": 200, "b": 100}, {"a": 100})
    assert not tick(state, report("a", 0, 1, 0), barriers=two)
    tick(state, report("a", 0, 1, 2), barriers=(two[0],))
    assert (state.version, state.forced_version) == (1, 0)
    assert not state.satisfied(two[0])
    # The commit that completes it is the forced version itself; ten that wait get the same.
    tick(state, report("b", 0, 1, 1), barriers=(two[0],) * 10)
    assert (state.version, state.forced_version) == (2, 2)
    assert state.satisfied(two[0])


def test_a_barrier_forces_a_version_where_nothing_is_to_be_committed() -> None:
    state = log_of("a")
    assert tick(state, report("a", 0, 1, 0), barriers=({},))
    assert (state.version, state.forced_version, state.published) == (1, 1, 1)
    assert state.streams["a"].latest == CommitContext(1, 1, 1, 0)


# -- history ----------------------------------------------------------------------------------------


def committed(state: Repository, now: float, *reports: ReplicaReport) -> None:
    """One commit for these, taken by their replicas at once."""
    state.apply(RepositoryTick(now, reports))
    taken = [
        report(r.stream, state.version, r.local_offset + r.length, 0, log_server=r.replica)
        for r in reports
    ]
    state.apply(RepositoryTick(now, tuple(taken), issue=False))


def versions(stream: StreamState) -> tuple[list[int], list[int]]:
    """Of the commits that are kept: for consumers, and for replicas."""
    return [each.version for each in stream.past], [c.context.version for c in stream.history]


def test_history_is_kept_for_replicas_and_live_consumers_and_no_longer() -> None:
    state = log_of("a")
    for n in range(1, 6):
        committed(state, 0.0, report("a", state.version, n, 1))
    stream = state.streams["a"]
    assert versions(stream) == ([], [5])
    state.apply(ConsumerSeen("lake", 5, until=100.0))
    for n in range(6, 10):
        committed(state, 50.0, report("a", state.version, n, 1))
    assert versions(stream) == ([5, 6, 7, 8], [9])
    assert state.trim_limit("a", 50.0) == 6
    assert state.trim_limit("a", 101.0) == 10
    state.apply(ConsumerSeen("lake", 7, until=100.0))
    assert state.trim_limit("a", 50.0) == 8
    committed(state, 60.0, report("a", 9, 10, 1))
    assert versions(stream) == ([7, 8, 9], [10])
    committed(state, 101.0, report("a", 10, 11, 1))  # its lease has ended
    assert versions(stream) == ([], [11])
    assert state.consumers == {}


def test_versions_that_a_reader_has_seen_in_another_history_are_skipped() -> None:
    state = log_of("a", "b")
    committed(state, 0.0, report("a", 0, 1, 2))
    assert (state.version, state.published) == (1, 1)
    assert state.apply(VersionRaised(50))
    assert not state.apply(VersionRaised(50))
    assert not state.apply(VersionRaised(7))
    assert (state.version, state.published) == (50, 50)
    # An empty commit for every replica, at the place where its stream ends.
    assert missed(state.streams["a"], 1) == [CommitContext(50, 3, 3, 0)]
    assert missed(state.streams["b"], 1) == [CommitContext(50, 1, 3, 0)]
    # A replica that has not heard of it goes on all the same.
    committed(state, 0.0, report("a", 1, 3, 1), report("b", 50, 1, 1))
    assert contexts(state, 51) == {"a": CommitContext(51, 3, 3, 1), "b": CommitContext(51, 1, 4, 1)}
    # What is not taken by every replica is not published.
    tick(state, report("a", 51, 4, 1), report("b", 51, 2, 0))
    state.apply(VersionRaised(60))
    assert (state.version, state.published) == (60, 51)


def test_a_consumer_that_has_published_nothing_holds_everything_until_it_is_dropped() -> None:
    state = log_of("a")
    state.apply(ConsumerSeen("new", None, until=100.0))
    committed(state, 0.0, report("a", 0, 1, 3))
    assert state.trim_limit("a", 0.0) == 1
    assert state.apply(ConsumerDropped("new"))
    assert not state.apply(ConsumerDropped("new"))
    assert state.trim_limit("a", 0.0) == 4


def test_an_idle_stream_costs_nothing_however_many_versions_pass() -> None:
    state = log_of("busy", "idle")
    committed(state, 0.0, report("busy", 0, 1, 1), report("idle", 0, 1, 1))
    sizes = []
    for n in range(2, 36_002):
        committed(state, 0.0, report("busy", state.version, n, 1))
        if n in (100, 36_001):
            sizes.append(len(json.dumps(state.to_record())))
    assert state.version == 36_001
    assert len(state.streams["idle"].history) == 1
    # One empty commit brings the idle stream to the newest version.
    assert len(state.streams["idle"].missed(1)) == 1
    assert sizes[1] - sizes[0] < 100  # numbers have more digits, and that is all


# -- time -------------------------------------------------------------------------------------------

HOUR, DAY = 3600.0, 86_400.0


def test_26_an_idle_log_records_the_time_at_once_and_every_hour_and_drops_leases_that_have_ended() -> (
    None
):
    """Also without any version: the next repository goes on from there, and not from its machine's clock."""
    state = log_of("a")
    assert state.since == 0.0
    assert state.apply(RepositoryTick(DAY, (), issue=False))
    assert state.since == DAY
    state.apply(ConsumerSeen("lake", None, DAY + 90 * 60.0))
    kept = [
        minutes
        for minutes in range(10, 24 * 60, 10)
        if state.apply(RepositoryTick(DAY + minutes * 60.0, (report("a", 0, 1, 0),)))
    ]
    assert kept == [60 * hour for hour in range(1, 24)]
    assert state.since == DAY + 23 * HOUR
    assert not state.consumers


def test_26_leases_that_were_granted_without_a_time_end_no_sooner_than_they_would_have() -> None:
    """By an earlier version: none was longer than a week, so it was that time at least."""
    state = log_of("a")
    state.apply(record_from_json('{"kind":"ConsumerSeen","name":"a","version":1,"until":864000}'))
    assert state.since == 3 * DAY


# -- seals and members ------------------------------------------------------------------------------


def sealed_report(length: int, log_server: str, term: int, version: int = 1) -> ReplicaReport:
    """Of a stream of which the first three entries are committed."""
    return replace(report("a", version, 4, length, log_server=log_server), term=term)


@pytest.fixture
def three() -> Repository:
    state = log_of("a", log_servers=("k", "l", "m"))
    tick(state, *(report("a", 0, 1, 3, log_server=k) for k in "klm"))
    tick(state, *(sealed_report(0, k, 1) for k in "klm"))
    assert (state.version, state.published) == (1, 1)
    return state


def test_19_a_sealed_stream_commits_nothing_and_seals_again(three: Repository) -> None:
    reports = [sealed_report(2, k, 1) for k in "klm"]
    three.apply(StreamSealed("a", 2))
    tick(three, *reports, barriers=({"a": 0},))
    # It learns versions all the same.
    assert three.streams["a"].latest == CommitContext(2, 4, 4, 0)
    three.apply(StreamSealed("a", 3))
    assert not three.apply(StreamUnsealed("a", 2, ("k", "l", "m"))), "it was sealed again since"
    tick(three, *(replace(each, term=3, version=2) for each in reports))
    assert three.streams["a"].last.context.version == 1


def test_19_history_is_trimmed_while_another_stream_stays_sealed(three: Repository) -> None:
    """A sealed stream, whose replicas are silent, holds back neither what can be read nor the history of other streams."""
    three.apply(StreamSealed("a", 2))
    three.apply(StreamCreated("b", ("k",)))
    for number in range(1, 1001):
        committed(three, 0.0, report("b", three.version, number, 1))
    assert three.published == three.version == 1001
    assert [len(three.streams[name].history) for name in "ab"] == [1, 1]
    # A consumer holds its own version of both, sealed or not.
    three.apply(ConsumerSeen("lake", 1001, until=100.0))
    for number in range(1001, 1011):
        committed(three, 50.0, report("b", three.version, number, 1))
    assert versions(three.streams["b"]) == ([*range(1001, 1011)], [1011])
    assert three.trim_limit("a", 50.0) == 4
    assert three.trim_limit("b", 50.0) == 1001
    # What the sealed stream needs to go on is there: all its members are behind by empty versions only.
    assert missed(three.streams["a"], 1) == [CommitContext(1011, 4, 1013, 0)]
    assert three.apply(StreamUnsealed("a", 2, ("k", "l", "m")))
    reports = (sealed_report(1, each, 2, version=1) for each in "klm")
    tick(three, *reports)
    assert three.streams["a"].latest.length == 1


def test_19_a_commit_that_a_sealed_stream_lacks_is_kept_until_it_is_unsealed(
    three: Repository,
) -> None:
    tick(three, *(sealed_report(2, each, 1) for each in "klm"))
    three.apply(StreamSealed("a", 2))
    three.apply(StreamCreated("b", ("k",)))
    for number in range(1, 11):
        committed(three, 0.0, report("b", three.version, number, 1))
    assert three.published == 1, "no member is known to have it"
    assert [each.version for each in missed(three.streams["a"], 1)] == [2, three.version]
    # m is left out: it holds nothing back any more.
    three.apply(StreamUnsealed("a", 2, ("k", "l")))
    committed(three, 0.0, report("b", three.version, 11, 1))
    assert three.published == three.version
    assert [len(three.streams[name].history) for name in "ab"] == [1, 1]


def test_23_the_stream_goes_on_without_the_replica_that_is_left_out(three: Repository) -> None:
    three.apply(StreamSealed("a", 2))
    assert three.apply(StreamUnsealed("a", 2, ("k", "l")))
    tick(three, *(sealed_report(2, k, 2) for k in "kl"), sealed_report(0, "m", 1))
    assert three.streams["a"].latest == CommitContext(2, 4, 4, 2)
    committed(three, 0.0, *(replace(report("a", 2, 6, 0, log_server=k), term=2) for k in "kl"))
    assert three.published == 2, "nor is it waited for by readers"
    # Its report is no fault, and holds no history.
    (found,) = three.evaluate([sealed_report(0, "m", 1)])
    assert (found.reason, found.outside, found.ahead) == ("", True, False)
    assert len(three.streams["a"].history) == 1
    # A version that nobody issued shows that records were lost here, whoever knows it.
    (found,) = three.evaluate([sealed_report(0, "m", 1, version=9)])
    assert found.ahead


def test_21_a_report_from_before_the_seal_does_not_count(three: Repository) -> None:
    """The entries in it were removed by the seal."""
    late = [sealed_report(2, k, 1) for k in "klm"]
    three.apply(StreamSealed("a", 2))
    three.apply(StreamUnsealed("a", 2, ("k", "l", "m")))
    tick(three, *late)
    assert three.streams["a"].last.context.version == 1
    tick(three, *(replace(each, term=2) for each in late))
    assert three.streams["a"].latest == CommitContext(2, 4, 4, 2)


def test_20_a_replica_that_is_taken_back_learns_the_version_and_is_needed_again(
    three: Repository,
) -> None:
    three.apply(StreamSealed("a", 2))
    three.apply(StreamUnsealed("a", 2, ("k",)))
    three.apply(ReplicasAssigned("a", ("k", "m", "n")))
    assert three.streams["a"].outside == ("m", "n")
    committed(three, 0.0, sealed_report(2, "k", 2))
    three.apply(StreamSealed("a", 3))
    three.apply(StreamUnsealed("a", 3, ("k", "n")))
    assert three.streams["a"].applied == {"k": 2, "n": 2}
    assert three.published == 2, "what is sealed at a commit has it durably"
    both = [replace(report("a", 2, 6, 1, log_server=k), term=3) for k in "kn"]
    tick(three, both[0])
    assert three.version == 2
    tick(three, *both)
    assert three.version == 3
    assert Repository.from_record(three.to_record()).to_record() == three.to_record()


# -- invariants -------------------------------------------------------------------------------------


class Replicas:
    """Replicas that write, lose commits, answer late, and are sealed, left out and taken back, by a seed.

    A replica that is no member keeps what it had, and goes on reporting it.
    """

    def __init__(self, choose: random.Random, streams: list[str], log_servers: list[str]) -> None:
        self.choose = choose
        self.written = dict.fromkeys(streams, 0)
        self.held = {(s, k): 0 for s in streams for k in log_servers}
        self.at = {(s, k): CommitContext(0, 1, 1, 0) for s in streams for k in log_servers}
        self.terms = {(s, k): 0 for s in streams for k in log_servers}
        self.old: list[ReplicaReport] = []

    def reports(self, state: Repository) -> list[ReplicaReport]:
        found = []
        for (stream, log_server), context in self.at.items():
            if self.terms[stream, log_server] == state.streams[stream].term:
                self.written[stream] += self.choose.choice((0, 0, 1, 3))
                self.held[stream, log_server] = self.choose.randint(
                    max(self.held[stream, log_server], context.end - 1), self.written[stream]
                )
            if self.choose.random() < 0.8:
                length = self.held[stream, log_server] + 1 - context.end
                plain = report(stream, context.version, context.end, length, log_server=log_server)
                found.append(replace(plain, term=self.terms[stream, log_server]))
        self.old += found
        extra = [self.choose.choice(self.old)] if self.old and self.choose.random() < 0.3 else []
        mixed = found + extra
        self.choose.shuffle(mixed)
        return mixed

    def unsealed(self, state: Repository, name: str) -> StreamUnsealed:
        """The record after a seal: some members have lost their tails, and others have been synchronized with them."""
        stream = state.streams[name]
        sealed = self.choose.sample(stream.members, self.choose.randint(1, len(stream.members)))
        joined = [each for each in stream.outside if self.choose.random() < 0.5]
        for each in sealed:
            for commit in missed(stream, self.at[name, each].version):
                assert commit.local_offset == self.at[name, each].end, "dense"
                assert commit.end - 1 <= self.held[name, each], (
                    "I12: a member lacks what is committed"
                )
                self.at[name, each] = commit
        for each in (*sealed, *joined):
            self.at[name, each] = self.at[name, sealed[0]]
            self.held[name, each] = stream.last.context.end - 1
            self.terms[name, each] = stream.term
        self.written[name] = stream.last.context.end - 1
        return StreamUnsealed(name, stream.term, tuple(sorted((*sealed, *joined))))

    def take(self, state: Repository) -> None:
        for (stream, log_server), context in self.at.items():
            if log_server in state.streams[stream].members and self.choose.random() < 0.7:
                for commit in missed(state.streams[stream], context.version):
                    assert commit.version > self.at[stream, log_server].version, "I5"
                    assert commit.local_offset == self.at[stream, log_server].end, "dense"
                    assert commit.end - 1 <= self.held[stream, log_server], (
                        "I6: not held by this one"
                    )
                    self.at[stream, log_server] = commit


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_any_run_keeps_the_invariants_and_is_a_function_of_its_log(seed: int) -> None:
    choose = random.Random(seed)
    streams, log_servers = ["a", "b", "c"], ["k", "l", "m"]
    records: list[Record] = [Created("log"), LogServerSeen("k", "here")]
    records += [StreamCreated(s, tuple(log_servers)) for s in streams]
    state = Repository()
    for record in records:
        state.apply(record)
    replicas = Replicas(choose, streams, log_servers)
    ranges: list[tuple[int, int, str, int]] = []
    published = 0
    for step in range(80):
        barriers = ({choose.choice(streams): choose.randint(0, 5000)},) * choose.randint(0, 2)
        extra: list[Record] = [
            ConsumerSeen("lake", choose.choice((None, published)), step + choose.randint(1, 9)),
            ConsumerDropped("lake"),
            *(StreamSealed(s, state.streams[s].term + 1) for s in streams),
            VersionRaised(state.version + choose.randint(-1, 1)),
        ]
        reports = tuple(replicas.reports(state))
        tick_ = RepositoryTick(float(step), reports, barriers, issue=choose.random() < 0.8)
        ended = [
            replicas.unsealed(state, name)
            for name, stream in state.streams.items()
            if stream.sealed and choose.random() < 0.5
        ]
        for drawn in [tick_, *choose.sample(extra, choose.randint(0, 1)), *ended]:
            before = checked(state)
            version = state.version
            # What is kept went through its stored form.
            record = record_from_json(record_to_json(drawn))
            if state.apply(record):
                records.append(record)
            check_invariants(state, before)
            assert state.version - version in (0, 1)
            if state.version > version:
                for name in sorted(streams):
                    context = state.streams[name].latest
                    if context.length:
                        ranges.append(
                            (context.global_offset, context.length, name, context.version)
                        )
        replicas.take(state)
        assert state.published >= published, "what was readable stays readable"
        published = state.published
        for (stream, log_server), context in replicas.at.items():
            history = state.streams[stream]
            assert history.at(published) is not None
            if log_server in history.members:
                assert history.at(context.version) is not None, "I10: a member's version is gone"
        for consumer in state.consumers.values():
            if consumer.version is not None and consumer.until > step:
                for stream in streams:
                    at = state.streams[stream].at(consumer.version)
                    assert at is None or state.trim_limit(stream, step) <= at.context.end, "I10"
    following = 1
    for start, length, _, _ in sorted(ranges):
        assert start == following, "I4: global ranges have no gap and no overlap"
        following += length
    assert [r[3] for r in sorted(ranges)] == sorted(r[3] for r in ranges), "I4: in version order"
    assert published > 0

    again = Repository()
    for number, record in enumerate(records):
        assert again.apply(record)
        if number == len(records) // 2:
            again = Repository.from_record(json.loads(json.dumps(again.to_record())))
    assert again.to_record() == state.to_record(), "I11"


@pytest.mark.parametrize(
    ("length", "term", "why"),
    [
        ((1 << 40) + 1, 1, "entries that are not committed"),
        (-1, 1, "-1 entries that are not committed"),
        (1, (1 << 48) + 2, "too far beyond the last one"),
    ],
)
def test_38_a_report_of_more_than_there_can_be_does_not_count(
    length: int, term: int, why: str
) -> None:
    """Its offsets would use up the global ones, its term those of all later seals."""
    repository = Repository()
    for record in (Created("log"), StreamCreated("a", ("k",)), TermGiven("a", 1)):
        repository.apply(record)
    made_up = replace(report("a", 0, 1, length), term=term)
    [found] = repository.evaluate([made_up])
    assert why in found.reason
    assert not repository.apply(RepositoryTick(1.0, (made_up,))) or repository.version == 0
    assert repository.next_term("a", [made_up]) < 1 << 48


def test_38_a_log_that_has_used_up_its_global_offsets_says_so() -> None:
    """No replica takes a commit beyond the last count: the stream would be blocked, and nobody would know why."""
    repository = Repository()
    for record in (Created("log"), StreamCreated("a", ("k",))):
        repository.apply(record)
    repository.next_global = MAX_COUNT - (1 << 40) + 1
    for length, why in ((0, ""), (1, "used up its global offsets")):
        found = report("a", 0, 1, length)
        [evaluation] = repository.evaluate([found])
        assert evaluation.reason.startswith(why and "the log has " + why)
        repository.apply(RepositoryTick(1.0, (found,)))
    assert repository.version == 0
    repository.next_global -= 1
    repository.apply(RepositoryTick(1.0, (report("a", 0, 1, 1),)))
    assert repository.version == 1


def test_38_the_next_term_is_above_what_any_replica_of_the_stream_shows() -> None:
    repository = Repository()
    for record in (
        Created("log"),
        StreamCreated("a", ("k", "l", "m")),
        StreamSealed("a", 3),
        StreamUnsealed("a", 3, ("k", "l")),
    ):
        repository.apply(record)

    def shows(log_server: str, term: int, stream: str = "a", log_id: str = "log") -> ReplicaReport:
        return replace(report(stream, 0, 1, 0, log_server=log_server), term=term, log_id=log_id)

    assert repository.next_term("a", []) == 4
    assert repository.next_term("a", [shows("k", 3), shows("l", 8)]) == 9
    # One that is not in sync cannot be taken back with a seal below its term.
    assert repository.next_term("a", [shows("m", 1 << 40)]) == (1 << 40) + 1
    # One that was synchronized has sent no report with its term yet. No term that was made up counts.
    assert repository.next_term("a", [shows("l", 8)], [12, 1 << 50]) == 13
    # Others say nothing about this stream.
    others = [shows("x", 77), shows("k", 77, log_id="other"), shows("k", 77, stream="b")]
    assert repository.next_term("a", others) == 4


def test_the_next_term_of_an_old_repository_stays_below_the_seals_of_a_rebuild() -> None:
    """A replica that has learned the fence is ahead of it: its term is no reason to seal above the new repository."""
    repository = Repository()
    for record in (Created("log"), StreamCreated("a", ("k", "l")), StreamSealed("a", 3)):
        repository.apply(record)
    fenced = replace(report("a", 1_000_000_000, 1, 0, log_server="k"), term=1_000_003)
    assert repository.next_term("a", [fenced]) == 4
