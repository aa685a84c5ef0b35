"""The log without bytes of the simulations answers as a replica that has them."""

import random
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from spark_consumers.lake.epoch.log_view import _inside
from tests.support.lake.huge_log import START_TIME, HugeLog, HugeStream
from tests.support.log_entries import SCHEMAS, EntryMaker
from walsender_bridge.change_log.client import EntryBatch, LogEntry, read_header
from walsender_bridge.change_log.protocol import CommitContext, IssuedCommit
from walsender_bridge.change_log.replica.host import HostedReplica


class Reader:
    """A reader of a replica of this process."""

    def __init__(self, replica: HostedReplica) -> None:
        self._replica = replica

    def read_batch(self, first: int, end: int, relations: tuple[()]) -> EntryBatch:
        found, behind = self._replica.read(first, end, relations)
        entries = [LogEntry(e.offset, e.version, e.global_offset, e.data) for e in found]
        return EntryBatch(entries, behind, "log")


def drawn_commits(make: EntryMaker, choose: random.Random) -> list[list[bytes]]:
    """Commits of small and large entries, of which some are of one transaction."""
    commits = []
    for _ in range(6):
        entries = [make.whole(size=choose.randint(10, 500)) for _ in range(choose.randint(1, 4))]
        for _ in range(choose.randint(0, 2)):
            sizes = [choose.randint(100, 1 << 20) for _ in range(choose.randint(2, 12))]
            entries.append(make.start(size=sizes[0]))
            entries += [make.middle(size=size) for size in sizes[1:-1]]
            entries.append(make.end(size=sizes[-1]))
        commits.append(entries)
    return commits


def test_a_log_without_bytes_answers_as_a_replica_that_has_them(tmp_path: Path, seed: int) -> None:
    commits = drawn_commits(EntryMaker(seed), random.Random(seed))
    replica = HostedReplica(tmp_path / "stream")
    replica.create("stream", "log")
    session, _ = replica.open_writer(1)
    entries = [data for commit in commits for data in commit]
    ends = np.cumsum([1, *map(len, commits)])[1:]
    for version, (commit, end) in enumerate(zip(commits, ends.tolist(), strict=True), 1):
        replica.append(session, commit, list(SCHEMAS.values()), None, 2**64 - 1)
        first = end - len(commit)
        context = CommitContext(version, first, first, len(commit))
        replica.commit([IssuedCommit(context)], int(time.time() * 1e6))
    headers = dict(enumerate(map(read_header, entries), 1))
    #: Where each transaction begins that goes on in the next entry.
    begun = {h.max_xid: at for at, h in headers.items() if h.max_xid and not h.ends_transaction}
    sizes = np.array([len(data) for data in entries])
    times = np.full(len(commits), START_TIME)
    stream = HugeStream("a", sizes, ends, times, np.array(sorted(begun.values())))
    log = HugeLog(stream)
    reader: Any = log.of(log.status().streams["a"])
    real: Any = Reader(replica)
    edges = 0
    for first, end in combinations([1, *ends.tolist()], 2):
        there = list(_inside(real, first, end))
        here = list(_inside(reader, first, end))
        assert [edge.offset for edge in here] == [edge.offset for edge in there]
        assert [edge.begun and edge.begun.xid for edge in here] == [
            edge.begun and begun[edge.begun.xid] for edge in there
        ]
        edges += len(there)
        for most in (None, 1 << 20, 1 << 22):
            planned = replica.plan(first, len(commits), most, None)
            assert [(c.version, c.end_offset, c.bytes_total) for c in planned] == [
                (c.version, c.end_offset, c.bytes_total)
                for c in reader.plan(first, len(commits), most)
            ]
    assert edges > 10
    replica.close()
