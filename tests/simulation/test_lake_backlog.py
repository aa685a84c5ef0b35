"""A copy that was asked for is shown in few epochs, and in one that does not grow, however far the log is ahead.

The planner's own decisions (`choose`, `Pace`) over a log in memory, which grows while epochs are written: by as many
bytes as they hold, or more, so that the lake never catches up with it.
"""

import random
from functools import partial
from math import log2
from unittest import mock

import pytest

from spark_consumers.lake.epoch import plan
from spark_consumers.lake.epoch.plan import Pace, choose, first_version, thinned
from spark_consumers.lake.manifest.chain import Manifest, StreamPosition, TableVersion
from walsender_bridge.change_log.client import CutPoint, StreamCut

NAME = "a.public.t"
SEEDS = 60


class GrowingLog:
    """One stream or more; a commit of the log ends each of its versions, at offset, LSN and version alike."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.commits: dict[str, list[CutPoint]] = {stream: [] for stream in ("a", "b")}
        self.version = 0
        for _ in self.commits:
            self.grow(1)

    def grow(self, size: int) -> None:
        """So many more bytes, in transactions of any size."""
        while size > 0:
            self.version += 1
            stream = "a" if self.version < 3 else self.random.choice("aab")
            taken = self.random.randint(1, 100)
            before = self.commits[stream][-1].bytes_total if self.commits[stream] else 0
            at = self.version
            self.commits[stream].append(CutPoint(at, at, before + taken, at, at))
            size -= taken

    def cuts(self) -> dict[str, StreamCut]:
        """Where the newest version cuts each stream."""
        last = {stream: found[-1] for stream, found in self.commits.items() if found}
        return {
            s: StreamCut(s, ("",), c.end_offset, c.end_offset, c.version, c.version, 1, 1, 0)
            for s, c in last.items()
        }

    def up_to(self, version: int, head: Manifest) -> dict[str, list[CutPoint]]:
        """All commits that are not in the lake, up to a version, as `log_view.all_commits` has them."""
        return {
            stream: thinned(
                c
                for c in commits
                if c.end_offset > head.streams[stream].offset and c.version <= version
            )
            for stream, commits in self.commits.items()
        }

    def at(self, stream: str, version: int) -> CutPoint | None:
        """The last commit up to a version."""
        return next((c for c in reversed(self.commits[stream]) if c.version <= version), None)

    def after(self, head: Manifest, limit: int) -> dict[str, list[CutPoint]]:
        """What an epoch may hold, as `log_view.new_commits` has it."""
        found = {}
        for stream, commits in self.commits.items():
            position = head.streams.get(stream)
            if position is None:
                continue
            new = [c for c in commits if c.end_offset > position.offset]
            if not new:
                continue
            before = [c.bytes_total for c in commits if c.end_offset <= position.offset]
            begin = before[-1] if before else 0
            within = [c for c in new if c.bytes_total - begin <= limit]
            found[stream] = within or new[:1]
        return found


def begun(log: GrowingLog, state: str) -> Manifest:
    """A lake at the log's beginning, with one table that is to be copied again."""
    table = TableVersion(
        "old", "iceberg", 1, "", ("id",), (), 0, 1, 0, 1, state, timeline=1, resync="asked for"
    )
    streams = {stream: StreamPosition(1, 1, 1, 1) for stream in log.commits}
    return Manifest("lake", 3, 1, 0, 1, 0.0, streams=streams, tables={NAME: table})


def copied(head: Manifest, log: GrowingLog) -> Manifest:
    """The copy is made where the log is now."""
    at = log.commits["a"][-1].version
    copy = TableVersion("new", "iceberg", 2, "", ("id",), (), at, at, 0, 1, "copied", timeline=1)
    return head.next(0.0, copies={NAME: copy})


def epochs_until_shown(seed: int, state: str) -> tuple[int, float]:
    """How many epochs the copy took, and how many are allowed: by the logarithm of the backlog, up to the largest epochs."""
    log = GrowingLog(seed)
    head = begun(log, state)
    size = log.random.randint(100, 2000)
    backlog = size * log.random.randint(1, 60)
    rate = log.random.choice([0.0, 0.9, 1.0, 2.0])
    pace = Pace(size)
    log.grow(backlog)
    head = copied(head, log)
    # Each stream is planned by its own size, and a transaction may be larger than what is left.
    allowed = log2(max(2 * backlog / size, 2)) + 4 + backlog / (16 * size)
    count = 0
    while NAME in head.copies and count <= 4 * allowed:
        chosen = choose(head, log.version, log.cuts(), log.after(head, pace.limit))
        held = sum(
            commits[-1].bytes_total - commits[0].bytes_total
            for commits in (part.cuts for part in chosen.ranges)
        )
        log.grow(int(rate * held))
        head = head.next(
            0.0,
            epoch=chosen.version,
            streams=chosen.streams,
            tables=chosen.tables,
            copies=chosen.copies,
        )
        pace.published(chosen)
        count += 1
    return count, allowed


@pytest.mark.parametrize("state", ["live", "stale"])
def test_a_copy_is_shown_after_few_epochs(state: str, seed: int) -> None:
    for number in range(seed, seed + SEEDS):
        print(f"seed {number}")
        count, allowed = epochs_until_shown(number, state)
        assert count <= allowed


def test_without_growing_epochs_it_is_not(seed: int) -> None:
    with mock.patch.object(Pace, "published", return_value=None):
        found = [epochs_until_shown(number, "live") for number in range(seed, seed + SEEDS)]
    assert any(count > allowed for count, allowed in found)


def attempts_for_a_held_table(seed: int) -> list[int]:
    """Where the epoch ends that shows a held table again, at each attempt; the log grows in between."""
    log = GrowingLog(seed)
    log.grow(5000)
    head = copied(begun(log, "held"), log)
    ends = []
    for _ in range(3):
        log.grow(log.random.randint(1, 3000))
        lsns = plan.needed(head, log.cuts())
        ends_at = [
            first_version(partial(log.at, stream), head.epoch, log.version, lsn)
            for stream, lsn in lsns.items()
        ]
        version = max(ends_at, default=log.version)
        listed = log.up_to(version, head)
        chosen = choose(head, version, log.cuts(), listed, is_complete=True)
        assert chosen.version == version
        assert chosen.tables[NAME].state == "live"
        assert NAME not in chosen.copies
        ends.append(chosen.version)
    return ends


def test_an_epoch_that_is_tried_again_does_not_grow(seed: int) -> None:
    for number in range(seed, seed + SEEDS):
        print(f"seed {number}")
        assert len(set(attempts_for_a_held_table(number))) == 1


def test_without_an_end_it_grows(seed: int) -> None:
    with mock.patch.object(plan, "needed", return_value={}):
        assert len(set(attempts_for_a_held_table(seed))) == 3
