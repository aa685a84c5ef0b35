"""Epochs of sizes that fit no test machine: the planner's own functions over a log that has metadata and no bytes.

What is bounded is asserted as counts and bytes; CPU and memory of the driver are those of this process, and what they are compared
with is stated at each place.
"""

import pickle
import time
import tracemalloc
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from spark_consumers.lake.epoch import log_view, plan
from spark_consumers.lake.epoch.divided import Share
from spark_consumers.lake.epoch.packed import PackedTable
from spark_consumers.lake.epoch.plan import COMPOSED_RANGES, RANGE_BYTES, Pace
from spark_consumers.lake.epoch.stage import Staged, composing_of
from spark_consumers.lake.epoch.target import Target
from spark_consumers.lake.manifest.chain import COPIED, LIVE, Manifest, StreamPosition, TableVersion
from spark_consumers.lake.manifest.table_version import HELD
from tests.support.lake.huge_log import START_TIME, HugeLog, HugeStream
from walsender_bridge.change_log.protocol import MAX_PLAN
from walsender_bridge.observability import lag

MIB, GB = 1 << 20, 10**9
#: `max_bytes_per_epoch` of `Lakehouse` by default.
LIMIT = 256 * MIB
WEEK = 7 * 86_400
#: One each four seconds.
COMMITS = WEEK // 4


def table(number=0, state=LIVE, start_lsn=0, offset=1):
    path = f"tables/a/public/t{number}"
    return TableVersion(
        *(path, "iceberg", 1, "", ("id",), (), start_lsn, offset, 0, number + 1, state),
        timeline=1,
    )


def target(name):
    schema = pa.schema([("id", pa.int64()), ("v", pa.string())])
    return Target(name, name.partition(".")[2], "tables/t/data/", schema, schema, ("id",), 0, 1)


def head_of(log, count=1, **others):
    """A lake at the beginning of the log, with so many tables of its first stream."""
    first = next(iter(log.streams))
    tables = {f"{first}.public.t{n}": table(n) for n in range(count)}
    streams = {stream: StreamPosition(1, 0, START_TIME * 10**6, 1) for stream in log.streams}
    return Manifest("lake", 3, 0, 0, 1, 0.0, streams=streams, tables={**tables, **others})


def after(head, chosen):
    """The link that publishes the plan."""
    return head.next(
        0.0,
        epoch=chosen.version,
        streams=chosen.streams,
        tables=chosen.tables,
        copies=chosen.copies,
    )


@pytest.fixture
def planner(monkeypatch):
    """Plans the next epoch of a lake over a log without bytes: the plan, and its tasks."""

    def planned(log, head, limit=LIMIT, *, everything=False):
        monkeypatch.setattr(log_view, "StreamReader", log)
        status = log.status()
        chosen, late = log_view.next_epoch(head, status, limit, everything=everything)
        inside = log_view.edges(status, chosen, late)
        packed = {name: PackedTable.of(target(name), (None, 8)) for name in chosen.tables}
        addresses = {stream: cut.addresses for stream, cut in status.streams.items()}
        work = plan.tasks(chosen, packed, addresses, late, inside, "scratch", "stage")
        return chosen, work

    return planned


def log_of(commits, entries=1, size=MIB, step=1, name="a"):
    """One stream of such commits; `size`: of an entry."""
    sizes = np.full(commits * entries, size, np.int64)
    ends = np.arange(1, commits + 1) * entries + 1
    times = START_TIME + np.arange(1, commits + 1)
    return HugeStream(name, sizes, ends, times, np.zeros(0, np.int64), step)


def with_transaction(seed, size):
    """A log of small commits, with one transaction of this size in the middle of one; its first entry, and the stream.

    Its entries differ: they are up to 1 MiB, and one is a row of 300 MiB. Its commit has small transactions before and behind it.
    """
    drawn = np.random.default_rng(seed)
    its = drawn.integers(64 << 10, MIB, 2 * size // MIB)
    its = its[: int(np.searchsorted(np.cumsum(its), size - 300 * MIB)) + 1]
    its[len(its) // 3] = 300 * MIB
    small = [drawn.integers(100, 1000, count) for count in (50, 3, 4, 50)]
    first = 1 + len(small[0]) + len(small[1])
    sizes = np.concatenate([small[0], small[1], its, small[2], small[3]])
    ends = [*range(2, 52), first + len(its) + len(small[2])]
    ends += [ends[-1] + n for n in range(1, 51)]
    times = START_TIME + np.arange(1, len(ends) + 1)
    return first, HugeStream("a", sizes, np.array(ends), times, np.array([first]))


def tasks_of(work, name="a.public.t0"):
    """The tasks that read the log, and those that compose the changes of one table of each of them."""
    found = [
        Staged(name, task.number, 1, partial=str(task.number), parts=task.parts) for task in work
    ]
    return composing_of(target(name), found, "scratch")


# -- one transaction of 20 GB -----------------------------------------------------------------------


def test_a_transaction_of_20_gb_is_one_epoch_of_many_bounded_tasks(planner, seed):
    first, stream = with_transaction(seed, 20 * GB)
    log = HugeLog(stream)
    head, sizes = head_of(log), []
    largest = int(stream.sizes.max())
    while head.epoch < len(stream.ends):
        chosen, work = planner(log, head)
        covers = [(task.start, task.end) for task in work]
        assert covers[0][0] == head.streams["a"].offset
        assert covers[-1][1] == chosen.streams["a"].offset
        assert all(before[1] == then[0] for before, then in pairwise(covers))
        sizes.append([log.size("a", *offsets) for offsets in covers])
        for task in work:
            # A task inside of the transaction knows it; one that begins where a commit ends has nothing to know.
            inside = first < task.start and task.start not in stream.ends
            assert (task.begun.xid if task.begun else None) == (first if inside else None)
        head = after(head, chosen)
    # Before it, the transaction, and behind it: an epoch ends at a commit.
    assert [len(each) for each in sizes][::2] == [1, 1]
    assert max(map(sum, sizes)) > 20 * GB - largest
    whole = sizes[1]
    assert len(whole) > 20 * GB / (2 * RANGE_BYTES)
    # Two batches, of which each ends with the entry that fills it.
    assert sorted(whole)[-2] <= RANGE_BYTES + 2 * MIB
    assert max(whole) <= RANGE_BYTES + MIB + largest
    # The log is read once for that, batch by batch, and the plan has no more of it than its tasks.
    assert log.calls["read_batch"] <= 2 * len(whole) + 20


def test_what_one_table_gets_in_a_transaction_of_20_gb_is_composed_in_parts(planner, seed):
    _, stream = with_transaction(seed, 20 * GB)
    log = HugeLog(stream)
    head = after(head_of(log), planner(log, head_of(log))[0])
    _, work = planner(log, head)
    composing = tasks_of(work)
    parts = len(composing)
    assert [task.share for task in composing] == [Share(part, parts) for part in range(parts)]
    # Keys are divided evenly by their digests: so many ranges' worth of changes is what a task composes.
    assert len(work) / len(composing) <= COMPOSED_RANGES
    assert len(composing) < 2 * len(work) / COMPOSED_RANGES + 1
    # Each part has data files of its own, and counts nothing twice.
    assert len({task.target.prefix for task in composing}) == len(composing)
    assert len({task.scratch for task in composing}) == len(composing)
    assert sum(task.changes for task in composing) == len(work)
    # Keys that changes link are composed by one task more, which all others are told of.
    linked = [Staged("t", n, 1, str(n), parts=9, linked="l" if n == 7 else None) for n in range(20)]
    found = [task.share for task in composing_of(target("t"), linked, "")]
    assert found == [Share(part, 9, ("l",)) for part in range(10)]
    assert [share.is_of_linked for share in found if share] == [False] * 9 + [True]


def test_small_commits_of_one_size_are_tasks_of_another(planner):
    """Whatever commits are: many in a task, or several tasks for each."""
    for entries, size in ((1, 1000), (5, 200 << 10), (9, MIB), (40, MIB)):
        log = HugeLog(log_of(200, entries, size))
        _, work = planner(log, head_of(log), LIMIT)
        read = [log.size("a", task.start, task.end) for task in work]
        # What the first commit of a task takes is not counted.
        assert max(read) <= 2 * RANGE_BYTES + 2 * MIB, (entries, size)
        assert len(work) <= sum(read) / RANGE_BYTES * 2 + 1


# -- 100 GB after a week ----------------------------------------------------------------------------


def week(seed):
    """100 GB in a week: most commits are small, ten are a transaction of 1 GB."""
    drawn = np.random.default_rng(seed)
    sizes = drawn.exponential(1.0, COMMITS)
    sizes = (sizes * 90 * GB / sizes.sum()).astype(np.int64) + 1
    entries = np.ones(COMMITS, np.int64)
    large = COMMITS // 20 + drawn.choice(COMMITS * 9 // 10, 10, replace=False)
    entries[large] = 1000
    ends = np.cumsum(entries) + 1
    every = np.repeat(np.where(entries > 1, GB // 1000, sizes), entries)
    times = START_TIME + 4 * np.arange(1, COMMITS + 1)
    return HugeStream("a", every, ends, times, np.sort(ends[large] - 1000))


def lag_of(log, head):
    """How far the lake is behind the log, in bytes and seconds, as a user is told."""
    seen: Any = SimpleNamespace(lake=head, log=log.status())
    return lag._merge(seen, "a", seen.log.streams["a"])


def caught_up(planner, log, head, limit=LIMIT):
    """Each epoch until the lake has the whole log: what was planned of it, and the link."""
    pace, newest = Pace(limit), log.status().version
    while head.epoch < newest:
        chosen, work = planner(log, head, pace.limit)
        assert chosen.version > head.epoch
        pace.published(chosen)
        head = after(head, chosen)
        yield chosen, work, head


def test_a_backlog_of_100_gb_ends_in_bounded_epochs_that_leave_nothing_out(planner, seed):
    log = HugeLog(stream := week(seed))
    head = head_of(log, 3)
    read, epochs, offset = 0, 0, 1
    first = lag_of(log, head)
    behind, seconds = [first.bytes], [first.seconds]
    assert behind[0] == pytest.approx(100 * GB, rel=0.01)
    assert seconds[0] == WEEK
    for chosen, work, link in caught_up(planner, log, head):
        (part,) = chosen.ranges
        size = log.size("a", part.start, part.end.offset)
        # Bounded, unless one transaction alone is larger; and it has commits.
        assert size <= LIMIT or len(part.cuts) == 1
        assert 0 < len(part.cuts) <= MAX_PLAN
        # Each commit once, and each task its part of them.
        assert part.start == offset == work[0].start
        assert all(before.end == then.start for before, then in pairwise(work))
        assert work[-1].end == part.end.offset
        offset, read, epochs = part.end.offset, read + size, epochs + 1
        # What `tuskline lag`, `status` and the metrics say meanwhile.
        said = lag_of(log, link)
        behind.append(said.bytes)
        seconds.append(said.seconds)
    assert read == int(stream.sizes.sum())
    assert offset == int(stream.ends[-1])
    # No epoch is much smaller than it might be: what does not fit any more is an average commit, or one of 1 GB.
    assert epochs <= read / LIMIT * 1.1 + 2 * 10
    assert epochs >= read / LIMIT - 10 * GB / LIMIT
    assert all(before > then for before, then in pairwise(behind))
    assert all(before > then for before, then in pairwise(seconds))
    assert (behind[-1], seconds[-1]) == (0, 0.0)


def test_a_week_of_small_commits_is_as_many_epochs_as_answers_of_the_log(planner):
    log = HugeLog(log_of(COMMITS, size=300))
    head = head_of(log)
    epochs = [len(chosen.ranges[0].cuts) for chosen, _, _ in caught_up(planner, log, head)]
    assert len(epochs) == -(-COMMITS // MAX_PLAN)
    assert sum(epochs) == COMMITS


def test_a_backlog_of_two_streams_ends_at_one_version_in_each_epoch(planner):
    """One stream has all of the bytes, the other one all of the commits: neither gets ahead of the other."""
    large, small = log_of(500, 4, MIB, step=20), log_of(10_000, size=100, name="b")
    log = HugeLog(large, small)
    count = 0
    for chosen, _, _ in caught_up(planner, log, head_of(log), 64 * MIB):
        count += 1
        for stream in (large, small):
            last = min(chosen.version // stream.step, len(stream.ends))
            expected = int(stream.ends[last - 1]) if last else 1
            assert chosen.streams[stream.name].offset == expected
    assert count == pytest.approx(500 * 4 / 64, rel=0.1)


def measured(function):
    """The answer, seconds of CPU, and the most memory that was taken meanwhile."""
    tracemalloc.start()
    try:
        answer = function()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    began = time.process_time()
    function()
    return answer, time.process_time() - began, peak


def test_an_epoch_of_a_backlog_takes_what_it_holds_and_not_what_waits(planner, seed):
    """The driver's memory and CPU for the first epoch, with 1 GB behind it and with 100."""
    cost = []
    for commits in (COMMITS // 100, COMMITS):
        log = HugeLog(week(seed).first(commits))
        head = head_of(log, 3)
        _, seconds, peak = measured(lambda log=log, head=head: planner(log, head))
        cost.append((seconds, peak))
    assert cost[1][0] <= 2 * cost[0][0] + 0.1
    assert cost[1][1] <= 1.5 * cost[0][1] + MIB
    # Of 450 commits, and about 30 tasks for their 256 MiB.
    assert max(peak for _, peak in cost) < MIB
    assert max(seconds for seconds, _ in cost) < 0.5


def test_the_plan_of_a_large_transaction_takes_kilobytes_for_each_task(planner, seed):
    _, stream = with_transaction(seed, 20 * GB)
    log = HugeLog(stream)
    head = after(head_of(log), planner(log, head_of(log))[0])
    (_, work), seconds, peak = measured(lambda: planner(log, head))
    assert peak < 1500 * len(work)
    assert seconds < 0.0002 * len(work) + 0.2


def test_a_copy_that_waits_makes_epochs_sixteen_times_as_large_and_no_larger(planner, seed):
    log = HugeLog(week(seed))
    newest = log.status().streams["a"]
    waiting = table(9, COPIED, newest.last_end_lsn, newest.end_offset)
    head = head_of(log, 3).next(0.0, copies={"a.public.t9": waiting})
    sizes, states = [], []
    for chosen, _, link in caught_up(planner, log, head):
        (part,) = chosen.ranges
        sizes.append(log.size("a", part.start, part.end.offset))
        states.append(link.tables.get("a.public.t9"))
    assert max(sizes) <= 16 * LIMIT
    assert len(sizes) <= 100 * GB / (16 * LIMIT) + 2 * 10
    # It is shown once, where it can be.
    assert [state is not None for state in states] == [False] * (len(states) - 1) + [True]


def test_held_tables_come_back_in_one_epoch_without_a_list_of_its_commits(planner, seed):
    """Nothing between can be shown: that is two days of 40,000 commits, of which the driver keeps one in many."""
    commits = COMMITS * 2 // 7
    log = HugeLog(stream := week(seed).first(commits))
    totals = log.totals["a"]
    back = int(stream.ends[commits - 1000])
    held = {f"a.public.h{n}": table(100 + n, HELD) for n in range(500)}
    copies = {
        name: table(200 + n, COPIED, int(totals[back]) - n, back) for n, name in enumerate(held)
    }
    head = head_of(log, 500, **held).next(0.0, copies=copies)
    tracemalloc.start()
    chosen, work = planner(log, head, everything=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert chosen.version == commits - 999
    assert set(held) <= chosen.fresh
    assert chosen.streams["a"].offset == back
    assert work[0].start == 1
    assert work[-1].end == back
    assert max(log.size("a", task.start, task.end) for task in work) <= 2 * RANGE_BYTES + 2 * MIB
    assert log.calls["cut_before"] <= 20
    assert len(chosen.ranges[0].cuts) <= 1.2 * int(totals[back]) / RANGE_BYTES + 2 * 10
    # 10,000 commits at a time, and a kilobyte for each task.
    assert peak < 4 * MIB + 1500 * len(work)


# -- 1,000 tables -----------------------------------------------------------------------------------


def test_what_tables_add_to_an_epoch_grows_with_their_number_alone(planner):
    log = HugeLog(log_of(300, 1, MIB))
    cost = {}
    for count in (250, 1000):
        head = head_of(log, count)
        (chosen, work), seconds, peak = measured(lambda head=head: planner(log, head))
        cost[count] = seconds, peak
        assert len(chosen.tables) == count
        # All tasks share what they know of the tables.
        assert len({id(task.tables) for task in work}) == 1
        assert len(work[0].tables) == count
    assert cost[1000][1] <= 5 * cost[250][1] + MIB
    # Four times as many, and a margin for a busy machine; with tables times tables it would be sixteen.
    assert cost[1000][0] <= 8 * cost[250][0] + 0.05
    sent = [len(pickle.dumps(work[:n])) for n in (1, 16)]
    assert sent[1] < 1.1 * sent[0]


def test_of_a_thousand_changed_tables_each_is_composed_once(planner):
    log = HugeLog(log_of(300, 1, MIB))
    chosen, work = planner(log, head_of(log, 1000))
    assert sum(log.size("a", task.start, task.end) for task in work) <= LIMIT
    composing = [task for name in chosen.tables for task in tasks_of(work, name)]
    assert [task.target.name for task in composing] == [*chosen.tables]
